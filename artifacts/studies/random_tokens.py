"""Tokens dropped at random: what any other choice has to beat.

rotor validate MODEL --cache artifacts/studies/random_tokens.py:Random
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rotor.policies import Eviction
from rotor.policies.eviction import KeptTokens
from rotor.policies.policy import Seed


@dataclass(frozen=True)
class Random(Eviction):
    """Each token draws a number, and the b largest stay, whatever their age but for the newest token.

    Args:
        seed: the numbers depend on it, on layer, group and the token's place in its row.
    Source: a control; kvpress's RandomPress.
    """

    method: ClassVar[str] = "random"
    seed: Seed = 0

    def protected(self, budget: int) -> tuple[int, int]:
        return 0, 1

    def priority(self, held: KeptTokens) -> Tensor:
        return held.noise(self.seed)
