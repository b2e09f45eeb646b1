"""`token_accuracy` and `ppl_ratio`: next-token prediction on held-out text, as a ratio to the base model."""

from __future__ import annotations

import numpy as np

from ..scoring import resample
from .base import Measurement, Outputs, TextMetric


class TokenAccuracy(TextMetric):
    """Tokens predicted right by the compressed model over those by the base model."""

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        before, after = self._base[split].correct, outputs.text.correct
        ratio = resample(lambda a, b: b / np.maximum(a, 1), before, after)
        return Measurement.of(after.sum() / max(before.sum(), 1), ratio)


class PerplexityRatio(TextMetric):
    """Perplexity of the base model over that of the compressed one."""

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        before, after = self._base[split].nll, outputs.text.nll
        total = outputs.text.tokens * len(after)
        ratio = resample(lambda a, b: np.exp((a - b) / total), before, after)
        return Measurement.of(np.exp((before.sum() - after.sum()) / total), ratio)
