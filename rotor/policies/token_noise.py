"""Random numbers of tokens, the same wherever a token's row lies in its batch."""

from __future__ import annotations

import torch
from torch import Tensor

NOISE_BLOCK = 1024
"""Tokens whose noise is drawn together."""


class TokenNoise:
    """Numbers from (0, 1) for the tokens of one layer, by their places in their rows.

    The table that they are read from follows from the seed, and is not counted with the cache.

    Args:
        layer: its index, on which the numbers depend.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._blocks: list[Tensor] = []

    def table(self, seed: int, groups: int, tokens: int) -> Tensor:
        """[groups, at least `tokens`], on the CPU."""
        while len(self._blocks) * NOISE_BLOCK < max(1, tokens):
            mixed = ((seed * 1_000_003 + self._layer) * 1_000_003 + len(self._blocks)) % 2**63
            generator = torch.Generator().manual_seed(mixed)
            self._blocks.append(torch.rand(groups, NOISE_BLOCK, generator=generator).clamp(1e-6, 1 - 1e-6))
        return torch.cat(self._blocks, dim=1)

    def of(self, index: Tensor, seed: int) -> Tensor:
        """Of tokens at the places `index`, [batch_size, groups, slots]; of negative ones any number."""
        table = self.table(seed, index.shape[1], int(index.max()) + 1).to(index.device)
        return table.expand(len(index), -1, -1).gather(-1, index.clamp(min=0).long())
