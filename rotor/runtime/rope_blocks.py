"""RoPE in two parts: within a block of positions, which keys are stored with, and to the beginning of their block.

With T positions a block, R(m) = R(m - m mod T) R(m mod T). A key that is stored as R(m mod T) k still has what slow
planes have in common, as one before RoPE; and attention needs no key rebuilt: for all keys of a block a query is turned
back once, to its beginning.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""cos and sin, [positions, rotary_dim] each, of positions from a multiple of T on."""


def within_blocks(rotation: Rotation, positions: Tensor, rope_block: int) -> Rotation:
    """cos and sin that turn keys by their place in their block, of `positions`: [..., rotary_dim] each.

    Args:
        rotation: of at least the first block. Attention factors of RoPE (YaRN's) are left to `block_starts`.
    """
    place = positions % rope_block
    cos, sin = rotation
    return cos[place] / cos[0], sin[place] / cos[0]


def block_starts(rotation: Rotation, rope_block: int, first: int, count: int) -> Rotation:
    """cos and sin that turn stored keys to the beginning of their block: of positions first ... first + count - 1."""
    positions = torch.arange(first, first + count, device=rotation[0].device)
    positions -= positions % rope_block
    return rotation[0][positions], rotation[1][positions]
