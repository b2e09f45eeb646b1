"""`token_accuracy` and `ppl_ratio`: next-token prediction on held-out text, as a ratio to the base model."""

from __future__ import annotations

import numpy as np

from ..scoring import resample
from .base import Measurement, Seen, TextMetric


class TokenAccuracy(TextMetric):
    """Tokens predicted right by the compressed model over those by the base model."""

    def measure(self, seen: Seen, split: str) -> Measurement:
        before, after = self._base[split].correct, seen.text.correct
        ratio = resample(lambda a, b: b / np.maximum(a, 1), before, after)
        return Measurement.of(after.sum() / max(before.sum(), 1), ratio)


class PerplexityRatio(TextMetric):
    """Perplexity of the base model over that of the compressed one."""

    def measure(self, seen: Seen, split: str) -> Measurement:
        before, after = self._base[split].nll, seen.text.nll
        total = seen.text.tokens * len(after)
        ratio = resample(lambda a, b: np.exp((a - b) / total), before, after)
        return Measurement.of(np.exp((before.sum() - after.sum()) / total), ratio)
