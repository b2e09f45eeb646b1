"""What a metric is: an accuracy of a compressed model against the uncompressed one, 1 where nothing is lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ...models.layerwise import LayerwiseModel
from ...recipe import Evaluation
from ..scoring import Scores

RESAMPLES = 2000
"""Bootstrap resamples of rows."""


@dataclass(frozen=True)
class EvaluationContext:
    """What metrics are made for.

    spec: settings. rows: the text of each split, [rows, seq_len]. tokenizer: the model's, or None. config: its
    transformers config.
    """

    spec: Evaluation
    rows: dict[str, Tensor]
    tokenizer: Any
    config: Any


@dataclass(frozen=True)
class Outputs:
    """What a model put out on a split.

    text: scores of the text. states: what left the last layer on it, [rows, seq_len, hidden_size]; None where no one
    needs it. prompts: likewise on the rows that metrics asked for, by their names.
    """

    network: LayerwiseModel
    text: Scores
    states: Tensor
    prompts: dict[str, Tensor]


@dataclass(frozen=True)
class Measurement:
    """The accuracy of one compressed model on one split.

    value: 1 is equal to the uncompressed model, below 1 is worse.
    interval: its 95 % interval, or None where there is none. resampled: values of bootstrap resamples, if there are.
    fields: what is recorded beside it.
    """

    value: float
    interval: tuple[float, float] | None
    fields: dict[str, Any] = field(default_factory=dict)
    resampled: np.ndarray | None = None

    @classmethod
    def of(cls, value: float, resampled: np.ndarray, **fields: Any) -> Measurement:
        low, high = np.quantile(resampled, [0.025, 0.975])
        return cls(round(float(value), 6), (round(float(low), 6), round(float(high), 6)), fields, resampled)

    @classmethod
    def bootstrap(cls, value: Callable[..., Any], *columns: Any, **fields: Any) -> Measurement:
        """A value of sums, with its interval over resampled rows: the same rows drawn for all columns (paired).

        Args:
            value: from a sum for each column to the value; of arrays of sums, too.
            columns: [rows] or [rows, tokens] each; at least one.
        """
        sums = [np.asarray(column).reshape(len(column), -1).sum(-1) for column in columns]
        drawn = np.random.default_rng(0).integers(0, len(sums[0]), (RESAMPLES, len(sums[0])))
        return cls.of(value(*(own.sum() for own in sums)), value(*(own[drawn].sum(-1) for own in sums)), **fields)


def smallest(found: Sequence[Measurement]) -> Measurement:
    """The smallest of several, in each bootstrap resample too."""
    resampled = [one.resampled for one in found if one.resampled is not None]
    assert len(resampled) == len(found) > 0
    return Measurement.of(min(one.value for one in found), np.minimum.reduce(resampled))


class Metric(ABC):
    """One metric of one evaluation; it remembers what it found out about the uncompressed model.

    needs_reference: whether the Scores it is given must have kl_div.
    """

    needs_reference = False

    def __init__(self, name: str, context: EvaluationContext) -> None:
        self.name, self.context = name, context

    def rows(self, split: str) -> Tensor | None:
        """Rows [n, seq_len] of its own that are to be run beside the split's text.

        Raises:
            DataError: the model's tokenizer cannot make them.
        """
        del split
        return None

    def prefill(self, split: str) -> int | None:
        """Tokens of its own rows that may be read at once where a cache has a policy: nothing before is scored."""
        del split
        return None

    @abstractmethod
    def measure_base(self, outputs: Outputs, split: str) -> dict[str, Any]:
        """Look at the uncompressed model on a split, once, before any `measure`; returns what is to be recorded of it.

        Raises:
            DataError: the uncompressed model cannot be measured like this.
        """

    @abstractmethod
    def measure(self, outputs: Outputs, split: str) -> Measurement:
        """The accuracy of a compressed model on a split."""


class TextMetric(Metric):
    """A metric of the split's text alone, which compares with the uncompressed model's scores of it."""

    def __init__(self, name: str, context: EvaluationContext) -> None:
        super().__init__(name, context)
        self._base: dict[str, Scores] = {}

    def measure_base(self, outputs: Outputs, split: str) -> dict[str, Any]:
        self._base[split] = outputs.text
        return {}
