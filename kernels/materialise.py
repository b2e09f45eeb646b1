# mypy: disable-error-code="no-untyped-def"
"""Rows of the cache as keys and values in the model's dtype, for stock attention: prompts, and decoding where so many
planes are fast that rebuilding them in the tile costs more.
"""

from __future__ import annotations

from torch import Tensor

from rotor.format.layout import GroupClass

from .parameters import AttentionParameters
from .rotary import Rotation


def materialise(
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    cls: GroupClass,
    dtype,
    rotation: Rotation | None = None,
    *,
    first: int = 0,
    kv_len: int | None = None,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    tokens: int = 0,
    padded: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keys and values of the groups of a class, rotated as queries are (slow planes of post-RoPE keys are so already).

    Args:
        key, value: rows, [batch_size, kv_len, bytes] each (views of any strides), or with a block table pages
            [num_pages, page_size, bytes]; of numbers in `dtype`. Values of joint latents are read from `key`.
        rotation: cos and sin by index, [positions, rotary_dim], row 0 at the beginning of a block; None where keys are
            stored as they are read (post-RoPE, no RoPE).
        first: places of the block that lie before the first row.
        block_table: [batch_size, pages], int32; rows then come packed, sequence behind sequence: kv_start,
            [batch_size + 1], int32, says where each begins, `tokens` how many there are in all.
        padded: numbers of a key and value, zeros behind their own; 0: as many as they have.
    Returns:
        [batch_size, count * group_size, kv_len, head_dim] and [batch_size, count, kv_len, width]; in a model without
        RoPE the keys are latents, [batch_size, count, kv_len, width]. With a block table
        [tokens, count * group_size, head_dim] and [tokens, count, width].
    """
    raise NotImplementedError
