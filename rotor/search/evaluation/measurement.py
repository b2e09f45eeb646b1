"""A measured ratio with its bootstrap interval, and the metrics that need text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .scoring import Scores

RESAMPLES = 2000
"""Bootstrap resamples of runs of rows."""

RUN_TOKENS = 512
"""Tokens of a row that are drawn together; neighbours are alike, and long rows are few."""


@dataclass(frozen=True)
class Measurement:
    """The accuracy of one compressed model on one split.

    value: 1 is equal to the uncompressed model, below 1 is worse.
    interval: its 95 % interval. resampled: values of bootstrap resamples.
    fields: what is recorded beside it.
    """

    value: float
    interval: tuple[float, float]
    resampled: np.ndarray
    fields: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, value: float, resampled: np.ndarray, **fields: float) -> Measurement:
        low, high = np.quantile(resampled, [0.025, 0.975])
        return cls(round(float(value), 6), (round(float(low), 6), round(float(high), 6)), resampled, fields)

    @classmethod
    def bootstrap(cls, value: Callable[..., Any], *columns: Any, **fields: float) -> Measurement:
        """A value of sums, with its interval over resampled runs of rows: the same drawn for all columns (paired).

        Args:
            value: from a sum for each column to the value; of arrays of sums, too.
            columns: [rows] or [rows, tokens] each; at least one.
        """
        sums = [sums_of_runs(np.asarray(column)) for column in columns]
        drawn = np.random.default_rng(0).integers(0, len(sums[0]), (RESAMPLES, len(sums[0])))
        return cls.of(
            value(*(total.sum() for total in sums)), value(*(total[drawn].sum(-1) for total in sums)), **fields
        )


def sums_of_runs(column: np.ndarray) -> np.ndarray:
    """Sums of runs of RUN_TOKENS tokens of each row, of [rows, tokens]; [rows] as it is. A row's short rest belongs to
    its last run."""
    if column.ndim == 1:
        return column
    runs = max(1, column.shape[1] // RUN_TOKENS)
    return np.add.reduceat(column, np.arange(runs) * RUN_TOKENS, axis=1, dtype=np.float64).ravel()


def smallest(measurements: Sequence[Measurement]) -> Measurement:
    """The smallest of several, in each bootstrap resample too."""
    return Measurement.of(
        min(one.value for one in measurements), np.minimum.reduce([one.resampled for one in measurements])
    )


def measure_text(name: str, before: Scores, after: Scores) -> Measurement:
    """A metric of text by its name, from the scores of both models.

    token_accuracy: tokens predicted right over those by the base model. ppl_ratio: perplexity of the base model over
    that of the compressed one. top1_agreement: share of positions where both have the same argmax, right or not.

    kl_div: mean KL(base || compressed) per position; its accuracy is exp(-KL). The table gets both: `kl_div` in nats,
    with its 95 % interval `kl_div_low` to `kl_div_high`, and `kl_accuracy`. A target of 0.99 means at most 0.01005
    nats. The base model's logits are not kept: for a vocabulary of 128 K they would take half a megabyte a token. What
    enters its head is.
    """
    count = after.nll.numel()
    if name == "token_accuracy":
        return Measurement.bootstrap(lambda a, b: b / np.maximum(a, 1), before.correct, after.correct)
    if name == "ppl_ratio":
        return Measurement.bootstrap(lambda a, b: np.exp((a - b) / count), before.nll, after.nll)
    if name == "top1_agreement":
        return Measurement.bootstrap(lambda total: total / count, before.top1 == after.top1)
    assert name == "kl_div"
    assert after.kl_div is not None
    measurement = Measurement.bootstrap(lambda total: np.exp(-total / count), after.kl_div)
    low, high = np.quantile(-np.log(measurement.resampled), [0.025, 0.975])
    named = {"kl_div": after.kl_div.mean(), "kl_div_low": low, "kl_div_high": high}
    return replace(measurement, fields={name: round(float(value), 7) for name, value in named.items()})
