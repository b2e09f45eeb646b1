"""The metrics as data: what accuracy may mean, what each needs, and the words for it.

Names in recipes, help texts, tables and columns derive from these entries.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    needed = primitive_metrics(name)
    prompts = any(metric_info(part).prompts for part in needed)
    every = (other for other, info in METRICS.items() if not info.parts and (prompts or not info.prompts))
    return tuple(dict.fromkeys([*needed, *every]))
