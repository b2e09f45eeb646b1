# mypy: disable-error-code="no-untyped-def"
"""Ranges of keys that queries attend to, and the division of that work into equal slices, all on the device.

New tokens are packed one after another; those of sequence s begin at query_start[s]. Each attends to the keys
first ... end - 1 of its sequence, except those that a mask leaves out. The tiles of keys of all (sequence, group) form
one line, the groups of a sequence one after another, and each program takes an equal slice of the line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .exact_slots import ExactSlots


@dataclass(frozen=True)
class KeyRanges:
    """Keys that the new tokens of a batch attend to; made once per decode step, for all layers.

    first, end: [tokens], int32, range of each token.
    begin, until: [batch_size], int32, range of all tokens of a sequence.
    query_start: [batch_size + 1], int32, first token of each sequence; None if each has one token.
    longest: most new tokens of a sequence.
    mask: [tokens, kv_len], uint8, 1 for attended keys; only read for ranges with holes.
    holes: [tokens], int32, whether the range of a token has keys that are not attended.
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
        """Ranges of one new token per sequence, the last of its kv_lens keys."""
        end = kv_lens.int()
        first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
        return cls(first, end, first, end)

    @classmethod
    def packed(
        cls, query_start: Tensor, kv_lens: Tensor, tokens: int, longest: int, window: int | None = None
    ) -> KeyRanges:
        """Ranges of packed sequences with several new tokens, which are the last of their kv_lens keys.

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
        """Ranges from a mask, [batch_size, seq_len, kv_len], bool (True: attend), of any strides."""
        batch_size, seq_len, kv_len = mask.shape
        marks = mask.view(torch.uint8).reshape(-1, kv_len)
        marks = marks if marks.stride(1) == 1 else marks.contiguous()
        keys = marks.sum(-1, dtype=torch.int32)
        first = marks.argmax(-1).int()  # the first of equal maxima
        end = torch.where(keys > 0, kv_len - marks.flip(-1).argmax(-1), 0).int()
        holes = (keys != end - first).int()
        if seq_len == 1:
            return cls(first, end, first, end, mask=marks, holes=holes)
        some = (keys > 0).view(batch_size, seq_len)
        begin = first.view(batch_size, seq_len).masked_fill(~some, torch.iinfo(torch.int32).max).amin(-1)
        until = end.view(batch_size, seq_len).amax(-1)
        query_start = torch.arange(0, batch_size * seq_len + 1, seq_len, dtype=torch.int32, device=mask.device)
        return cls(first, end, begin, until, query_start, seq_len, marks, holes)


def ranges_of_codes(ranges: KeyRanges, exact: ExactSlots) -> KeyRanges:
    """The keys of `ranges` that are read from rows, in a layer with exact tokens."""
    if ranges.query_start is None:
        first, end = torch.maximum(ranges.first, exact.first), torch.minimum(ranges.end, exact.until.flatten())
        return replace(ranges, first=first, end=end, begin=first, until=end)
    until, stop = exact.until.flatten(), ranges.query_start[1:].contiguous()
    token = torch.arange(len(ranges.first), device=until.device)
    sequence = torch.searchsorted(stop, token, right=True).clamp(max=len(stop) - 1)
    return replace(
        ranges,
        first=torch.maximum(ranges.first, exact.first[sequence]),
        end=torch.minimum(ranges.end, until),
        begin=torch.maximum(ranges.begin, exact.first),
        until=torch.minimum(ranges.until, until[(stop - 1).clamp(min=0)]),
    )


LEAST_TILES = tl.constexpr(2)
"""Fewest tiles of a slice: a short line is shared by fewer programs."""


@triton.jit
def tiles_of(begin, until, STEP: tl.constexpr):
    """Number of tiles with keys begin ... until - 1; tiles begin at multiples of STEP."""
    return tl.where(until > begin, (until + STEP - 1) // STEP - begin // STEP, 0)


@triton.jit
def count_tiles(begin, until, batch_size, STEP: tl.constexpr):
    """Number of tiles of all sequences, for one group."""
    total = 0
    # Every program counts for itself, 64 sequences at a time, so that no launch before has to.
    for start in range(0, batch_size, 64):
        s = start + tl.arange(0, 64)
        some = s < batch_size
        total += tl.sum(tiles_of(tl.load(begin + s, mask=some, other=0), tl.load(until + s, mask=some, other=0), STEP))
    return total


@triton.jit
def sequence_at(begin, until, batch_size, groups, position, STEP: tl.constexpr):
    """Sequence at a position of the line, and the tiles (of one group) of the sequences before it."""
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
    """Number of programs that share a line of `total` tiles."""
    return tl.minimum(programs, (total + LEAST_TILES - 1) // LEAST_TILES)


@triton.jit
def slice_start(program, total, programs):
    """Position on the line where a program's slice begins; the previous program's slice ends there."""
    return (program.to(tl.int64) * total // tl.maximum(programs, 1)).to(tl.int32)
