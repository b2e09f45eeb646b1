"""`kl_div`: how far the compressed model's next-token distribution is from the base model's.

The base model's logits are not kept: for a vocabulary of 128 K they would take half a megabyte a token. What enters its
head is, so that a point costs one pass through the layers and two through the head, and only where this is chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..scoring import resample
from .base import Measurement, Metric, Outputs


class KLDivergence(Metric):
    """Mean KL(base || compressed) per position, in nats; its accuracy is exp(-KL): 1 at 0 nats, less at more.

    The table gets both: `kl_div` in nats, with its 95 % interval `kl_div_low` to `kl_div_high`, and `kl_accuracy`. A
    target of 0.99 means at most 0.01005 nats.
    """

    needs_reference = True

    def measure_base(self, outputs: Outputs, split: str) -> dict[str, Any]:
        del outputs, split
        return {}

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        scores = outputs.text
        assert scores.kl_div is not None
        total = scores.tokens * len(scores.kl_div)
        kl_div = float(scores.kl_div.sum() / total)
        resampled = resample(lambda nats: np.exp(-nats / total), scores.kl_div)
        low, high = (round(float(nats), 7) for nats in np.quantile(-np.log(resampled), [0.025, 0.975]))
        found = {"kl_div": round(kl_div, 7), "kl_div_low": low, "kl_div_high": high}
        return Measurement.of(np.exp(-kl_div), resampled, **found)
