# mypy: disable-error-code="no-untyped-def"
"""What the kernels want to know of ranges of keys and of masks, each by one launch on the device.

A mask is looked at once: one program a row of it finds where its keys begin and end, whether some between are hidden,
and writes down its bits. Plain PyTorch takes ten launches and more for the same, in every layer where nothing may be
remembered (`operators`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ahead import Variant
from .launch import launch

INTEGERS = ["queries", "kv_len", "batch_stride", "query_stride", "word_count"]
"""Not specialised on their values, as in the decode kernel; the stride of keys is, which mostly is 1."""


@triton.jit(do_not_specialize=INTEGERS)
def mask_kernel(
    mask, first, end, holes, words, queries, kv_len, batch_stride, query_stride, key_stride, word_count,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `mask_ranges`; one row of the mask, BLOCK keys at a time."""
    row = tl.program_id(0).to(tl.int64)
    source = mask + row // queries * batch_stride + row % queries * query_stride
    column = tl.arange(0, BLOCK)
    least = tl.full((BLOCK,), 2147483647, tl.int32)
    most = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, kv_len, BLOCK):
        index = start + column
        seen = tl.load(source + index.to(tl.int64) * key_stride, mask=index < kv_len, other=0) != 0
        least = tl.minimum(least, tl.where(seen, index, 2147483647))
        most = tl.where(seen, index + 1, most)
        count += seen.to(tl.int32)
        if WORDS:
            bit = tl.arange(0, 64).to(tl.int64)
            bits = tl.reshape(seen.to(tl.int64), (BLOCK // 64, 64)) << bit[None, :]
            word = start // 64 + tl.arange(0, BLOCK // 64)
            tl.store(words + row * word_count + word, tl.sum(bits, 1), mask=word < word_count)
    keys = tl.sum(count, 0)
    begin = tl.where(keys > 0, tl.min(least, 0), 0)
    until = tl.max(most, 0)
    tl.store(first + row, begin)
    tl.store(end + row, until)
    tl.store(holes + row, (keys != until - begin).to(tl.int32))


def mask_ranges(mask: Tensor, words: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The keys that each query attends to.

    Args:
        mask: [batch_size, seq_len, kv_len], bool (True: attend), of any strides.
        words: whether its bits are wanted.
    Returns:
        First key and end of the range, and whether keys of it are hidden, each [batch_size, seq_len], int32 (a range
        without keys is 0, 0); and the bits of the mask in words of 64, the lowest first, [batch_size, seq_len,
        kv_len / 64, rounded up], int64.
    """
    batch_size, seq_len, kv_len = mask.shape
    # Each by itself: parts of one tensor would begin at places for which no kernel was compiled ahead.
    first, end, holes = (torch.empty(batch_size, seq_len, dtype=torch.int32, device=mask.device) for _ in range(3))
    count = -(-kv_len // 64)
    bits = torch.empty(batch_size, seq_len, count, dtype=torch.int64, device=mask.device) if words else None
    marks = mask.view(torch.uint8)
    launch(
        mask_kernel, (batch_size * seq_len,), marks, first, end, holes, first if bits is None else bits, seq_len,
        kv_len, *marks.stride(), count, **mask_constants(words),
    )  # fmt: skip
    return first, end, holes, bits


def mask_constants(words: bool) -> dict[str, int | bool]:
    return {"WORDS": words, "BLOCK": 512 if words else 2048, "num_warps": 4}


@triton.jit(do_not_specialize=["batch_size"])
def prefix_kernel(first_key, end_key, prefix, batch_size, TILE: tl.constexpr, BATCH_PADDED: tl.constexpr):
    """See `tile_prefix`; one program."""
    sequence = tl.arange(0, BATCH_PADDED)
    some = sequence < batch_size
    first = tl.load(first_key + sequence, mask=some, other=0)
    end = tl.load(end_key + sequence, mask=some, other=0)
    tiles = tl.where(end > first, (end + TILE - 1) // TILE - first // TILE, 0).to(tl.int64)
    until = tl.cumsum(tiles, 0)
    tl.store(prefix + sequence, until - tiles, mask=some)
    tl.store(prefix + batch_size, tl.sum(tiles, 0))


def tile_prefix(first: Tensor, end: Tensor, tile: int) -> Tensor:
    """[batch_size + 1], int64: tiles of the keys first ... end - 1 in the sequences before each, both [batch_size],
    int32; tiles begin at multiples of `tile`.
    """
    prefix = torch.empty(len(first) + 1, dtype=torch.int64, device=first.device)
    launch(prefix_kernel, (1,), first, end, prefix, len(first), **prefix_constants(tile, len(first)))
    return prefix


def prefix_constants(tile: int, batch_size: int) -> dict[str, int]:
    return {"TILE": tile, "BATCH_PADDED": triton.next_power_of_2(batch_size), "num_warps": 4}


def range_variants(tile: int, batch_size: int, words: bool, masked: bool) -> list[Variant]:
    """What finds the ranges of a decoding step, or with words of a prefill."""
    integers = dict.fromkeys(("first", "end", "holes", "first_key", "end_key"), torch.int32)
    variants = []
    if masked:
        constants = mask_constants(words) | {"key_stride": 1}
        options = {"num_warps": constants.pop("num_warps")}
        pointers = integers | {"mask": torch.uint8, "words": torch.int64 if words else torch.int32}
        name = "words of a mask" if words else "ranges of a mask"
        variants.append(Variant(name, mask_kernel, pointers, dict(constants), (), options))
    if not words:
        tiles = prefix_constants(tile, batch_size)
        options = {"num_warps": tiles.pop("num_warps")}
        pointers = integers | {"prefix": torch.int64}
        variants.append(Variant(f"tiles of {tile} keys", prefix_kernel, pointers, dict(tiles), (), options))
    return variants
