# mypy: disable-error-code="no-untyped-def"
"""What decoding wants to know of a mask, by one launch: where its keys begin and end, and whether some are hidden.

Plain PyTorch takes ten launches and more for the same, in every layer where nothing may be remembered (`operators`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .ranges import KeyRanges

INTEGERS = ["queries", "kv_len", "batch_stride", "query_stride"]
"""Not specialised on their values; the stride of keys is, which mostly is 1."""

BLOCK = 2048


@triton.jit(do_not_specialize=INTEGERS)
def mask_kernel(
    mask, first, end, holes, queries, kv_len, batch_stride, query_stride, key_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """See `ranges_of_mask`; one row of the mask, BLOCK keys at a time."""
    row = tl.program_id(0).to(tl.int64)
    source = mask + row // queries * batch_stride + row % queries * query_stride
    column = tl.arange(0, BLOCK)
    least = tl.full((BLOCK,), 2147483647, tl.int32)
    most = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, kv_len, BLOCK):
        index = start + column
        attended = tl.load(source + index.to(tl.int64) * key_stride, mask=index < kv_len, other=0) != 0
        least = tl.minimum(least, tl.where(attended, index, 2147483647))
        most = tl.where(attended, index + 1, most)
        count += attended.to(tl.int32)
    keys = tl.sum(count, 0)
    begin = tl.where(keys > 0, tl.min(least, 0), 0)
    until = tl.max(most, 0)
    tl.store(first + row, begin)
    tl.store(end + row, until)
    tl.store(holes + row, (keys != until - begin).to(tl.int32))


def ranges_of_mask(mask: Tensor) -> KeyRanges:
    """The keys that each query attends to.

    Args:
        mask: [batch_size, seq_len, kv_len], bool (True: attend), of any strides.
    """
    batch_size, seq_len, kv_len = mask.shape
    rows = batch_size * seq_len
    # Each by itself: parts of one tensor would begin at places for which no kernel is compiled ahead.
    first, end, holes = (torch.empty(rows, dtype=torch.int32, device=mask.device) for _ in range(3))
    marks = mask.view(torch.uint8)
    launch(mask_kernel, (rows,), marks, first, end, holes, seq_len, kv_len, *marks.stride(), BLOCK=BLOCK, num_warps=4)
    whole = marks.expand(batch_size, seq_len, kv_len)
    if whole.stride(2) != 1 or (seq_len > 1 and batch_size > 1 and whole.stride(0) != seq_len * whole.stride(1)):
        whole = whole.contiguous()
    whole = whole[:, 0] if seq_len == 1 else whole.reshape(rows, kv_len)
    if seq_len == 1:
        return KeyRanges(first, end, first, end, mask=whole, holes=holes)
    some = (end > first).view(batch_size, seq_len)
    begin = first.view(batch_size, seq_len).masked_fill(~some, torch.iinfo(torch.int32).max).amin(-1)
    until = end.view(batch_size, seq_len).amax(-1)
    query_start = torch.arange(0, rows + 1, seq_len, dtype=torch.int32, device=mask.device)
    return KeyRanges(first, end, begin, until, query_start, seq_len, whole, holes)
