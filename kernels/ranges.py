# mypy: disable-error-code="no-untyped-def"
"""Which keys queries attend to, and how that work is cut into equal slices; all of it on the device.

New tokens stand one behind the other, those of sequence s from query_start[s] on; each sees the keys first ... end - 1
of its sequence, less those that a mask leaves out. The tiles of keys of all (sequence, group) stand in one line, groups
of a sequence behind each other, and each program takes an equal slice of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class KeyRanges:
    """What the new tokens of a batch attend to; made once a step, for all layers.

    first, end: [tokens], int32: of each token. begin, until: [batch_size], int32: of all tokens of a sequence.
    query_start: [batch_size + 1], int32: where the tokens of a sequence begin; None: one token each.
    longest: the most tokens of a sequence.
    mask, holes: [tokens, kv_len], uint8 (1: attend), and [tokens], int32: whether a range has keys that are not
        attended. The mask is only read where it has.
    """

    first: Tensor
    end: Tensor
    begin: Tensor
    until: Tensor
    query_start: Tensor | None = None
    longest: int = 1
    mask: Tensor | None = None
    holes: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.begin.shape[0]

    @classmethod
    def of_lengths(cls, kv_lens: Tensor, window: int | None = None) -> KeyRanges:
        """One token a sequence, the last of its kv_lens keys."""
        end = kv_lens.int()
        first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
        return cls(first, end, first, end)

    @classmethod
    def packed(
        cls, query_start: Tensor, kv_lens: Tensor, tokens: int, longest: int, window: int | None = None
    ) -> KeyRanges:
        """Sequences of several new tokens, which are the last of their kv_lens keys, packed one behind the other.

        query_start: [batch_size + 1], int32. Tokens behind the last sequence attend to nothing.
        """
        token = torch.arange(tokens, device=kv_lens.device)
        stop = query_start[1:].contiguous()
        sequence = torch.searchsorted(stop, token, right=True).clamp(max=len(stop) - 1)
        left = stop[sequence] - token
        end = torch.where(left > 0, kv_lens[sequence] - left + 1, 0).int()
        first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
        new = query_start[1:] - query_start[:-1]
        until = torch.where(new > 0, kv_lens, 0).int()
        begin = torch.zeros_like(until) if window is None else (until - new - window + 1).clamp(min=0).int()
        return cls(first, end, begin, until, query_start.int(), longest)

    @classmethod
    def of_mask(cls, mask: Tensor) -> KeyRanges:
        """By a mask, [batch_size, seq_len, kv_len], bool (True: attend), of any strides."""
        batch_size, seq_len, kv_len = mask.shape
        marks = mask.view(torch.uint8).reshape(-1, kv_len)
        marks = marks if marks.stride(1) == 1 else marks.contiguous()
        keys = marks.sum(-1, dtype=torch.int32)
        first = marks.argmax(-1).int()  # of equals the first
        end = torch.where(keys > 0, kv_len - marks.flip(-1).argmax(-1), 0).int()
        holes = (keys != end - first).int()
        if seq_len == 1:
            return cls(first, end, first, end, mask=marks, holes=holes)
        some = (keys > 0).view(batch_size, seq_len)
        begin = first.view(batch_size, seq_len).masked_fill(~some, torch.iinfo(torch.int32).max).amin(-1)
        until = end.view(batch_size, seq_len).amax(-1)
        query_start = torch.arange(0, batch_size * seq_len + 1, seq_len, dtype=torch.int32, device=mask.device)
        return cls(first, end, begin, until, query_start, seq_len, marks, holes)


LEAST_TILES = tl.constexpr(2)
"""Tiles of a slice, where there are fewer than programs could take."""


@triton.jit
def tiles_of(begin, until, STEP: tl.constexpr):
    """Tiles that hold keys begin ... until - 1; tiles begin at multiples of STEP."""
    return tl.where(until > begin, (until + STEP - 1) // STEP - begin // STEP, 0)


@triton.jit
def count_tiles(begin, until, batch_size, STEP: tl.constexpr):
    """Of all sequences."""
    total = 0
    for start in range(0, batch_size, 64):
        s = start + tl.arange(0, 64)
        some = s < batch_size
        total += tl.sum(tiles_of(tl.load(begin + s, mask=some, other=0), tl.load(until + s, mask=some, other=0), STEP))
    return total


@triton.jit
def sequence_at(begin, until, batch_size, groups, position, STEP: tl.constexpr):
    """The sequence whose tiles of any group hold a position of the line, and the tiles of those before it."""
    sequence = 0
    before = 0
    total = 0
    for start in range(0, batch_size, 64):
        s = start + tl.arange(0, 64)
        some = s < batch_size
        tiles = tiles_of(tl.load(begin + s, mask=some, other=0), tl.load(until + s, mask=some, other=0), STEP)
        passed = some & ((total + tl.cumsum(tiles, 0)) * groups <= position)
        sequence += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, tiles, 0))
        total += tl.sum(tiles)
    return sequence, before


@triton.jit
def slices(total, programs):
    """How many programs share a line of `total` tiles."""
    return tl.minimum(programs, (total + LEAST_TILES - 1) // LEAST_TILES)


@triton.jit
def slice_start(program, total, programs):
    """Where on the line the slice of a program begins, and that of the one before it ends."""
    return (program.to(tl.int64) * total // tl.maximum(programs, 1)).to(tl.int32)
