"""Keyformer: keep the newest tokens, and heavy hitters by a softmax with noise and a temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt

from ..column_sums import ScoreSoftmax
from ..eviction import KeptTokens, ScoringEviction
from ..policy import Seed, Share


@dataclass(frozen=True)
class Keyformer(ScoringEviction):
    """A token's score is f(j) = sum_i softmax_j((x_ij + zeta_j) / tau), averaged over the query heads that share it.

    Here x are the logits, zeta_j is a standard Gumbel number of the token, and tau grows from tau_first in the prompt
    to tau_last after `steps` tokens.

    Args:
        tau_first, tau_last: temperature in the prompt, and at the end of its growth. steps: tokens over which it grows.
        seed: of the noise, which depends on layer, group and the token's position alone.

    In an uncompressed model logarithms of attention weights stand for logits: both differ by one number a query, which
    softmax does not see.
    Limits: an uncompressed model stores all weights of a step, length^2 a head; a compressed one sums their columns.
    Source: Adnan et al., Keyformer (arXiv 2403.09054), section 3, equations 7 to 10, algorithm 1.
    """

    method: ClassVar[str] = "keyformer"
    recent: Share = 0.3
    tau_first: PositiveFloat = 1.0
    tau_last: PositiveFloat = 2.0
    steps: PositiveInt = 128
    seed: Seed = 0

    def score_softmax(self, held: KeptTokens) -> ScoreSoftmax:
        gumbel = -torch.log(-torch.log(held.noise(self.seed)))
        grown = min(1.0, held.generated / self.steps)
        return ScoreSoftmax(gumbel, self.tau_first + (self.tau_last - self.tau_first) * grown)
