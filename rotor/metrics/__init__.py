"""What accuracy means, by name: one file a metric."""

from __future__ import annotations

from typing import Any

from ..recipe import LM_EVAL, Evaluation, accuracy_field
from .base import Measurement, Metric
from .kl_div import KLDivergence
from .next_token import NextToken
from .recall import Recall
from .top1_agreement import Top1Agreement

__all__ = [
    "KLDivergence",
    "Measurement",
    "Metric",
    "Recall",
    "Top1Agreement",
    "accuracy_field",
    "describe",
    "make_metric",
]

_DESCRIPTIONS = {
    "default": "the smaller of the next-token accuracy ratio and the perplexity ratio to the uncompressed model",
    "token_accuracy": "the next-token accuracy ratio to the uncompressed model",
    "ppl_ratio": "the perplexity of the uncompressed model over that of this one",
    "top1_agreement": "the share of tokens where the most likely next token is the uncompressed model's",
    "kl_div": "exp(-KL) of the next-token distribution against the uncompressed model's",
    "recall": "the share of keys looked up from earlier in the prompt, as a ratio to the uncompressed model's",
}


def make_metric(spec: Evaluation, tokenizer: Any, config: Any) -> Metric:
    """The metric that a recipe names.

    Args:
        tokenizer: the model's, or None. config: its transformers config.
    Raises:
        UsageError: a package that it needs is not installed. DataError: its task cannot be loaded.
    """
    if spec.metric.startswith(LM_EVAL):
        from .harness import LMEval

        return LMEval(spec.metric, spec, tokenizer)
    if spec.metric == "recall":
        return Recall(spec.metric, spec, tokenizer, config)
    return {"top1_agreement": Top1Agreement, "kl_div": KLDivergence}.get(spec.metric, NextToken)(spec.metric)


def describe(name: str) -> str:
    """What the accuracy of a metric is, in words."""
    return _DESCRIPTIONS.get(name, f"the score of {name}, as a ratio to the uncompressed model's")
