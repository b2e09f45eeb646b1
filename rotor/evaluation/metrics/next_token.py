"""`token_accuracy` and `ppl_ratio`: next-token prediction on held-out text, as a ratio to the base model."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..scoring import Scores, resample
from .base import EvaluationContext, Measurement, Metric, Seen


class _NextToken(Metric):
    def __init__(self, name: str, context: EvaluationContext) -> None:
        super().__init__(name, context)
        self._base: dict[str, Scores] = {}

    def measure_base(self, seen: Seen, split: str) -> dict[str, Any]:
        self._base[split] = seen.text
        return {}


class TokenAccuracy(_NextToken):
    """Tokens predicted right by the compressed model over those by the base model."""

    def measure(self, seen: Seen, split: str) -> Measurement:
        before, after = self._base[split].correct, seen.text.correct
        ratio = resample(lambda a, b: b / np.maximum(a, 1), before, after)
        return Measurement.of(after.sum() / max(before.sum(), 1), ratio)


class PerplexityRatio(_NextToken):
    """Perplexity of the base model over that of the compressed one."""

    def measure(self, seen: Seen, split: str) -> Measurement:
        before, after = self._base[split].nll, seen.text.nll
        total = seen.text.tokens * len(after)
        ratio = resample(lambda a, b: np.exp((a - b) / total), before, after)
        return Measurement.of(np.exp((before.sum() - after.sum()) / total), ratio)
