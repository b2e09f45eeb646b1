"""Metrics of held-out text alone: next tokens, perplexity, and how near the distribution is to the base model's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .base import Measurement, Outputs, TextMetric


class TokenAccuracy(TextMetric):
    """Tokens predicted right by the compressed model over those by the base model."""

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        return Measurement.bootstrap(lambda a, b: b / np.maximum(a, 1), self._base[split].correct, outputs.text.correct)


class PerplexityRatio(TextMetric):
    """Perplexity of the base model over that of the compressed one."""

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        before, after = self._base[split].nll, outputs.text.nll
        return Measurement.bootstrap(lambda a, b: np.exp((a - b) / after.numel()), before, after)


class Top1Agreement(TextMetric):
    """Share of positions of held-out text where both models have the same argmax, whether it is right or not."""

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        agreed = self._base[split].top1 == outputs.text.top1
        return Measurement.bootstrap(lambda total: total / agreed.numel(), agreed)


class KLDivergence(TextMetric):
    """Mean KL(base || compressed) per position, in nats; its accuracy is exp(-KL): 1 at 0 nats, less at more.

    The table gets both: `kl_div` in nats, with its 95 % interval `kl_div_low` to `kl_div_high`, and `kl_accuracy`. A
    target of 0.99 means at most 0.01005 nats. The base model's logits are not kept: for a vocabulary of 128 K they
    would take half a megabyte a token. What enters its head is.
    """

    needs_reference = True

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        nats = outputs.text.kl_div
        assert nats is not None
        found = Measurement.bootstrap(lambda total: np.exp(-total / nats.numel()), nats)
        assert found.resampled is not None
        low, high = np.quantile(-np.log(found.resampled), [0.025, 0.975])
        named = {"kl_div": nats.mean(), "kl_div_low": low, "kl_div_high": high}
        return replace(found, fields={name: round(float(value), 7) for name, value in named.items()})
