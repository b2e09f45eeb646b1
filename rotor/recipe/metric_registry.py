"""The metrics that there are, as data: what accuracy may mean, what each needs, and the words for it.

Names in recipes, help texts, tables and columns derive from these entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MetricInfo:
    """One metric.

    name: as in `evaluation.metric`. field: of a measured split, where its accuracy is; 1 is equal to the uncompressed
    model. description, label: as a sentence's end, and as a column's head.
    parts: names of the metrics that it is the smallest of. prompts: whether it has rows of its own, beside the text.
    """

    name: str
    description: str
    label: str
    parts: tuple[str, ...] = ()
    field: str = ""
    prompts: bool = False

    @property
    def accuracy_field(self) -> str:
        return self.field or self.name


_ROWS = (
    MetricInfo(
        "default",
        "the smallest of the `token_accuracy`, `ppl_ratio`, `lookup` and `copy` ratios to the uncompressed model (the "
        "last two are look-up over a distance)",
        "accuracy",
        parts=("token_accuracy", "ppl_ratio", "lookup", "copy"),
    ),
    MetricInfo(
        "text",
        "the smaller of the `token_accuracy` and `ppl_ratio` ratios to the uncompressed model",
        "text ratio",
        parts=("token_accuracy", "ppl_ratio"),
    ),
    MetricInfo(
        "token_accuracy",
        "the next-token accuracy ratio to the uncompressed model on held-out text",
        "next-token accuracy ratio",
    ),
    MetricInfo(
        "ppl_ratio",
        "the perplexity of the uncompressed model on held-out text over that of this one",
        "perplexity ratio (base over compressed)",
    ),
    MetricInfo(
        "lookup",
        "the mean probability of values looked up by keys from the start of the row, across held-out text, as a ratio "
        "to the uncompressed model's",
        "look-up ratio (keys across filler text)",
        prompts=True,
    ),
    MetricInfo(
        "copy",
        "the mean probability of a run of random tokens that is repeated after held-out text, as a ratio to the "
        "uncompressed model's",
        "copying ratio (random tokens across filler text)",
        prompts=True,
    ),
    MetricInfo(
        "top1_agreement",
        "the share of tokens where the most likely next token is the uncompressed model's",
        "top-1 agreement",
    ),
    MetricInfo(
        "kl_div",
        "exp(-KL) of the next-token distribution against the uncompressed model's; the nats are recorded too",
        "KL divergence (nats per token)",
        field="kl_accuracy",
    ),
)

METRICS: dict[str, MetricInfo] = {info.name: info for info in _ROWS}
"""Metrics by name."""


def metric_info(name: str) -> MetricInfo:
    """The row of a metric; for one that only a foreign file names, a row with that name."""
    return METRICS.get(name) or MetricInfo(name, name, name)


def primitive_metrics(name: str) -> tuple[str, ...]:
    """The metrics that have to be measured for one: itself, or what it is the smallest of."""
    return metric_info(name).parts or (name,)


def report_metrics(name: str) -> tuple[str, ...]:
    """The metrics that are measured on the report split for one: all, but of a metric of text alone those of text."""
    own = primitive_metrics(name)
    prompts = any(metric_info(part).prompts for part in own)
    every = (other for other, info in METRICS.items() if not info.parts and (prompts or not info.prompts))
    return tuple(dict.fromkeys([*own, *every]))


def long_rows(measurements: Mapping[str, Any], base: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured of the report split's long rows, by what is measured on each split; nothing without them.

    Args:
        measurements, base: of rotor.json.
    """
    found, before = measurements.get("long"), base.get("long")
    if not found or not before:
        return []
    values = found["values"]
    names = {"token_accuracy": "next tokens", "ppl_ratio": "perplexity", "kl_div": "KL"}
    told = [f"{label} {values[name]:.4f}" for name, label in names.items() if isinstance(values.get(name), float)]
    return [("rows of 2,048 tokens", f"{', '.join(told)}, {before.get('tokens', 0)} predicted tokens")]


def ratio_rows(
    values: Mapping[str, float | None], base: dict[str, Any], left_out: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, str]]:
    """Label and value of each metric that is measured by itself, or why it was left out.

    Args:
        left_out: why, by split and name.
    """
    rows, missing = [], {name: why for of_split in left_out.values() for name, why in of_split.items()}
    for name, info in METRICS.items():
        value = None if info.parts else values.get(info.accuracy_field)
        if value is not None:
            rows.append((f"exp(-KL), {info.label}" if info.field else info.label, f"{value:.4f}{_of_base(name, base)}"))
        elif name in missing:
            rows.append((info.label, f"left out: {missing[name]}"))
    return rows


def _of_base(name: str, base: dict[str, Any]) -> str:
    """What a ratio is one to: of prompts the uncompressed model's probability, and over how much other text."""
    if name == "ppl_ratio" and isinstance(base.get("perplexity"), float):
        return f", base {base['perplexity']:.3f}"
    probability, filler_tokens = base.get(name), base.get(f"{name}_filler_tokens")
    if not isinstance(probability, float) or not isinstance(filler_tokens, int):  # another metric, or a foreign file
        return ""
    return f", base {probability:.3f}, over {filler_tokens} tokens of other text"


def chance_note(base: dict[str, Any]) -> str:
    """What is to be said of an uncompressed model that guesses, to whom ratios mean nothing; nothing of any other."""
    return "; it is at chance on this text, where ratios to it mean nothing" if base.get("at_chance") else ""
