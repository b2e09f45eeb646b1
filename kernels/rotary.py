"""RoPE in two parts: to the beginning of a block of positions, and within the block.

With T positions a block, R(m) = R(m - m mod T) R(m mod T); a stored key has the second rotation. See
`rotor.checkpoint.layout`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.checkpoint.layout import KeyForm

Rotation = tuple[Tensor, Tensor]
"""cos and sin, [..., positions, rotary_dim] each, as in transformers: both halves of the dimensions are equal."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE in transformers' layout (dimension i is paired with i + rotary_dim/2; the rest stays as it is).

    Args:
        x: [..., seq_len, head_dim].
        cos, sin: [..., seq_len, rotary_dim], broadcastable to the first rotary_dim dimensions of x.
    """
    rotary_dim = cos.shape[-1]
    planes = x[..., :rotary_dim]
    first, second = planes.chunk(2, dim=-1)
    rotated = planes * cos + torch.cat([-second, first], dim=-1) * sin
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat([rotated, x[..., rotary_dim:].expand(*rotated.shape[:-1], -1)], dim=-1)


def within_blocks(rotation: Rotation, positions: Tensor, form: KeyForm) -> Rotation:
    """cos and sin of keys as they are stored, for `positions`: [..., rotary_dim] each.

    Args:
        rotation: by position, from 0 on, of at least the first block. RoPE's attention factor (YaRN's) is left to
            `when_read`.
        form: with a rope_block.
    """
    assert form.rope_block is not None
    place = positions % form.rope_block
    cos, sin = rotation
    return cos[place] / cos[0], sin[place] / cos[0]


def relative(rotation: Rotation, to: Rotation) -> Rotation:
    """cos and sin of a rotation behind another one, in float32 or wider, without RoPE's attention factor."""
    wide = torch.promote_types(rotation[0].dtype, torch.float32)
    (cos, sin), (cos_to, sin_to) = ((side[0].to(wide), side[1].to(wide)) for side in (rotation, to))
    square = cos_to.square() + sin_to.square()
    return (cos * cos_to + sin * sin_to) / square, (sin * cos_to - cos * sin_to) / square


def beginnings_of(table: Tensor, block: int | None) -> Tensor:
    """cos or sin of the beginnings of blocks, of a table by position, [positions, rotary_dim].

    What has these already, [batch_size or 1, blocks, rotary_dim], is returned as it is.
    """
    return table[::block] if table.dim() == 2 else table


def of_sequences(rotation: Rotation | None, sequences: slice) -> Rotation | None:
    """The rotation of some sequences of a batch, where they have their own."""
    if rotation is None or rotation[0].dim() == 2 or len(rotation[0]) == 1:
        return rotation
    return rotation[0][sequences], rotation[1][sequences]


def when_read(rotation: Rotation, form: KeyForm, positions: Tensor | None = None) -> Rotation:
    """cos and sin of stored keys when they are read: to the beginning of their block.

    Args:
        rotation: by position, [kv_len, rotary_dim]; the first position is a multiple of the block.
        form: with a rope_block.
        positions: of the keys, rows of `rotation`; None is all of these.
    Returns:
        [*positions, rotary_dim] each.
    """
    assert form.rope_block is not None
    cos, sin = rotation
    index = torch.arange(len(cos), device=cos.device) if positions is None else positions
    start = index - index % form.rope_block
    return cos[start], sin[start]
