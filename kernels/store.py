# mypy: disable-error-code="no-untyped-def"
"""Store a new token of each sequence among its exact tokens: keys and values, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, padded

INTEGERS = [
    "offset", "begin", "slots_batch", "slots_head", "slots_slot", "key_batch", "key_head", "value_batch",
    "value_head",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=["offsets", "begins", "key", "value"])
def store_kernel(
    keys, values, key, value, offsets, begins, offset, begin, slots_batch, slots_head, slots_slot, key_batch,
    key_head, value_batch, value_head,
    FIRST: tl.constexpr, NEWEST: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, OFFSETS: tl.constexpr,
    BEGINS: tl.constexpr,
):  # fmt: skip
    """Store the token of one KV head. Grid: KV heads, sequences; see `store`.

    OFFSETS, BEGINS: the token's index, and where sequences begin, are read from the device.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    if OFFSETS:
        offset = tl.load(offsets)
    if BEGINS:
        begin = tl.load(begins + sequence)
    dim = tl.arange(0, DIM)
    inside = dim < HEAD_DIM
    own_key = tl.load(key + sequence * key_batch + head * key_head + dim, mask=inside)
    own_value = tl.load(value + sequence * value_batch + head * value_head + dim, mask=inside)
    place = sequence * slots_batch + head * slots_head + dim
    newest = place + (FIRST + offset % NEWEST) * slots_slot
    tl.store(keys + newest, own_key, mask=inside)
    tl.store(values + newest, own_value, mask=inside)
    if FIRST > 0:
        slot = tl.zeros((DIM,), tl.int64) + (offset - begin)
        among = inside & (slot >= 0) & (slot < FIRST)
        tl.store(keys + place + slot * slots_slot, own_key, mask=among)
        tl.store(values + place + slot * slots_slot, own_value, mask=among)


def store(
    keys: Tensor, values: Tensor, key: Tensor, value: Tensor, first: int, offset: Tensor | int, begin: Tensor | int
) -> None:
    """Store one new token of each sequence in the slot of its index, and in that of a first token if it is one.

    Args:
        keys, values: [batch_size, num_kv_heads, first + newest, head_dim], of equal strides. key, value: [batch_size,
            num_kv_heads, 1, head_dim].
        offset: index of the token. begin: index of the first token of each sequence, [batch_size], or one for all.
    """
    batch_size, heads, slots, head_dim = keys.shape
    assert keys.stride() == values.stride()
    on_device = isinstance(offset, Tensor), isinstance(begin, Tensor)
    launch(
        store_kernel, (heads, batch_size), keys, values, key, value, offset if on_device[0] else keys,
        begin if on_device[1] else keys, 0 if on_device[0] else offset, 0 if on_device[1] else begin,
        *keys.stride()[:3], *key.stride()[:2], *value.stride()[:2], FIRST=first, NEWEST=slots - first,
        HEAD_DIM=head_dim, DIM=padded(head_dim), OFFSETS=on_device[0], BEGINS=on_device[1], num_warps=1,
    )  # fmt: skip
