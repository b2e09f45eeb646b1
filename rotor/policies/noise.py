"""Random numbers of tokens, the same wherever a token's row lies in its batch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 1024
"""Tokens whose numbers are drawn together."""


def noise_of(index: Tensor, seed: int, layer: int) -> Tensor:
    """Numbers from (0, 1), for tokens at the places `index` of their rows, [batch_size, groups, slots]; of negative
    ones any."""
    groups = index.shape[1]
    blocks = [_block(seed, layer, block, groups) for block in range(int(index.max()) // BLOCK + 1)]
    table = torch.cat(blocks or [_block(seed, layer, 0, groups)], dim=1).to(index.device)
    return table.expand(len(index), -1, -1).gather(-1, index.clamp(min=0).long())


@lru_cache(maxsize=1024)
def _block(seed: int, layer: int, block: int, groups: int) -> Tensor:
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + layer) * 1_000_003 + block) % 2**63)
    return torch.rand(groups, BLOCK, generator=generator).clamp(1e-6, 1 - 1e-6)
