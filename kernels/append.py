# mypy: disable-error-code="no-untyped-def"
"""New tokens of a layer into rows: rotated, projected, floored and packed, queries rotated too, in one launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rotor.format.layout import AttentionShape, LayerLayout

from .rotary import Rotation


class Appended(NamedTuple):
    """query: rotated, [batch_size, num_heads, seq_len, head_dim], a view; None without one.

    key, value: rows, [batch_size, 1, seq_len, bytes] uint8, or of numbers [batch_size, 1, seq_len, width]; those that
    were given where `out` was.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor


def append(
    key: Tensor,
    value: Tensor | None,
    layout: LayerLayout,
    shape: AttentionShape,
    *,
    query: Tensor | None = None,
    key_basis: Tensor | None = None,
    key_shift: Tensor | None = None,
    rotation: Rotation | None = None,
    index: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
) -> Appended:
    """The rows of new tokens, and their queries rotated, in one launch.

    Args:
        key: where the key basis is folded (`layout.folds_keys`), latents [batch_size, seq_len, key_rank] as k_proj puts
            them out; else keys that are normed and not rotated, [batch_size, seq_len, num_kv_heads, head_dim], heads in
            the order of the layout. Any strides with an innermost one of 1.
        value: [batch_size, seq_len, value_rank] as v_proj puts it out: the values' latents; of joint latents their part
            of the key's; None where there is none (joint and folded).
        query: not rotated, [batch_size, seq_len, num_heads, head_dim]; None for none (a model without RoPE, or an
            engine that rotates them itself).
        key_basis: [group_size * head_dim, key_rank], key_shift: [key_rank] float32; None where folded, without codes.
        rotation: cos and sin, [positions, rotary_dim] each, float32 or the model's dtype, with RoPE's attention factor;
            None in a model without RoPE.
        index: integers, [seq_len] or [batch_size, seq_len]: the row of `rotation` of each token. Row 0 is at the
            beginning of a block of positions: row i is at place i mod rope_block. None: token t of sequence b has row
            b * seq_len + t, or t in a table of seq_len rows.
        out: rows to write into, in place of new ones: [batch_size, 1, seq_len, bytes] each, or with `slots` pages
            [num_pages, page_size, bytes]; of numbers in the model's dtype. The second is not read of a joint layer.
        slots: [batch_size * seq_len], integers: page * page_size + place in the page of each token; negative: none.
    """
    raise NotImplementedError
