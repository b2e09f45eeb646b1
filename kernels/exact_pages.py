# mypy: disable-error-code="no-untyped-def"
"""Store exact tokens in pages, in one launch; decoding reads them there (`finish`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

INTEGERS = [
    "page_size", "page_stride", "row_stride", "key_token", "key_head", "value_token", "value_head",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["key", "value", "slots"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a step."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def store_kernel(
    key, value, pages, slots, page_size, page_stride, row_stride, key_token, key_head, value_token, value_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Store the keys (program 0 of the second axis) or the values of one token. Grid: tokens, 2."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        head, dim = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, DIM)[None, :]
        inside = (head < HEADS) & (dim < HEAD_DIM)
        row = pages + slot // page_size * page_stride + slot % page_size * row_stride + head * HEAD_DIM + dim
        if tl.program_id(1) == 0:
            tl.store(row, tl.load(key + token * key_token + head * key_head + dim, mask=inside), mask=inside)
        else:
            numbers = tl.load(value + token * value_token + head * value_head + dim, mask=inside)
            tl.store(row + HEADS * HEAD_DIM, numbers, mask=inside)


def store_exactly(key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Store new tokens in pages of exact tokens.

    Args:
        key, value: [tokens, num_kv_heads, head_dim], keys after RoPE. The innermost stride is 1.
        pages: [num_pages, page_size, 2 * num_kv_heads * head_dim], the same dtype: keys, then values.
        slots: [tokens], integers, page * page_size + index in the page for each token; negative for none.
    """
    tokens, heads, head_dim = key.shape
    if not tokens:
        return
    launch(
        store_kernel, (tokens, 2), key, value, pages, slots, pages.shape[1], *pages.stride()[:2], *key.stride()[:2],
        *value.stride()[:2], HEADS=heads, HEAD_DIM=head_dim, HEADS_PADDED=triton.next_power_of_2(heads),
        DIM=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
