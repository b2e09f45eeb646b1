"""`kl_div`: how far the compressed model's next-token distribution is from the base model's.

The base model's logits are computed again for each batch instead of being kept: for a vocabulary of 128 K they would
take half a megabyte a token. So a point costs two forward passes instead of one, and only where this metric is chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..evaluation import Scores, bootstrap
from .base import Measurement, Metric


class KLDivergence(Metric):
    """Mean KL(base || compressed) per position, in nats; its accuracy is exp(-KL): 1 at 0 nats, less at more.

    The table gets both: `kl_div` in nats and `kl_accuracy`. A target of 0.99 means at most 0.01005 nats.
    """

    needs_reference = True

    def measure(self, model: Any, split: str, base: Scores, scores: Scores) -> Measurement:
        assert scores.kl_div is not None
        total = scores.tokens * len(scores.kl_div)
        kl_div = float(scores.kl_div.sum() / total)
        value = round(float(np.exp(-kl_div)), 6)
        bounds = bootstrap(lambda nats: np.exp(-nats / total), scores.kl_div)
        return Measurement(value, bounds, {"kl_accuracy": value, "kl_div": round(kl_div, 7)})
