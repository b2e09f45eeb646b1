"""Numbers drawn for tokens: what a choice by chance goes by."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Tokens whose numbers are drawn together."""


class TokenNoise:
    """A number from (0, 1) for each token and group, the same wherever the token's row lies in a batch.

    The table that it is read from follows from seed and layer, and is no part of a cache.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.blocks: list[Tensor] = []

    def __call__(self, index: Tensor, seed: int) -> Tensor:
        """Of tokens by their place in their row, [batch_size, groups, slots] int; below 0 anything. float32."""
        groups, most = index.shape[1], int(index.max()) if index.numel() else 0
        while len(self.blocks) * BLOCK <= most:
            mixed = ((seed * 1_000_003 + self._layer) * 1_000_003 + len(self.blocks)) % 2**63
            generator = torch.Generator().manual_seed(mixed)
            self.blocks.append(torch.rand(groups, BLOCK, generator=generator).clamp(1e-6, 1 - 1e-6))
        table = torch.cat(self.blocks, dim=1).to(index.device).expand(len(index), -1, -1)
        return table.gather(-1, index.clamp(min=0).long())
