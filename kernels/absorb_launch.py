"""Launch absorbing: alone, or with the rows of a step (`append`). Nothing waits for the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rotor.checkpoint.layout import LayerLayout

from .absorb import absorb_kernel
from .launch import kept_memory, sm_count
from .ranges import KeyRanges
from .rotary import Rotation, beginnings_of

if TYPE_CHECKING:
    from .decode_launch import DecodeLayer

ABSORBING_WARPS = 8
"""Warps of absorbing programs on an SM."""

ABSORBED_PART = 128
"""Most columns of absorbed queries that a product makes."""

MOST_BLOCKS = 128
"""Most blocks that a program of `absorb` takes at a time."""

ABSORBED_BYTES = 256 << 20
"""Most bytes of absorbed queries in one launch; larger batches are launched in equal parts, each with as many programs
as its own work takes."""


class JoinedPrograms(NamedTuple):
    """Absorbing as a part of another launch.

    shared: programs that share the blocks of a query. tensors: arguments of `absorb_head` from the basis to the ranges
    of keys. constants: of `DecodeLayer.absorb_constants`.
    """

    programs: int
    tensors: tuple[Tensor, ...]
    shared: int
    max_blocks: int
    starts_blocks: int
    scale: float
    constants: dict[str, object]


@dataclass(frozen=True)
class Absorbing:
    """Queries to absorb, for a decode step or a part of its sequences, and the memory that gets them.

    begin, until: the keys that are read from rows, [sequences], int32. query_start: first of at most `tokens` tokens of
        each sequence; None where each has one.
    starts, starts_blocks, max_blocks: of `absorb_head`. absorbed, constant: outputs, as `decode_kernel` takes them.
    """

    layer: DecodeLayer
    begin: Tensor
    until: Tensor
    query_start: Tensor | None
    tokens: int
    starts: Tensor
    starts_blocks: int
    max_blocks: int
    absorbed: Tensor
    constant: Tensor

    @classmethod
    def of(
        cls, layer: DecodeLayer, ranges: KeyRanges, part: slice, max_blocks: int, starts_of_blocks: Tensor | None
    ) -> Absorbing:
        """Absorbing for some sequences of a step.

        Args:
            starts_of_blocks: `block_starts`; None where keys are in no blocks.
        """
        tokens, sequences = ranges.longest, part.stop - part.start
        blocks = sequences * max_blocks * len(layer.layout.groups) * tokens * layer.group_rows
        numbers = blocks * layer.operands * layer.columns
        sizes = -(-numbers * layer.dtype.itemsize // 4), blocks * (1 + layer.scaled)
        absorbed, constant = kept_memory("absorbed queries", sizes, ranges.begin.device)
        starts, starts_blocks = constant if starts_of_blocks is None else starts_of_blocks, 0
        if starts.dim() == 4 and len(starts) > 1:  # those of each sequence
            starts, starts_blocks = starts[part], starts.shape[1]
        query_start = None if ranges.query_start is None else ranges.query_start[part.start : part.stop + 1]
        return cls(
            layer, ranges.begin[part], ranges.until[part], query_start, tokens, starts, starts_blocks, max_blocks,
            absorbed.view(layer.dtype), constant,
        )  # fmt: skip

    @property
    def queries(self) -> int:
        """Query heads of all tokens."""
        return len(self.begin) * self.tokens * self.layer.shape.num_heads

    @property
    def scale(self) -> float:
        """Factor on the constants of logits, which are to the base of 2."""
        return math.log2(math.e) * self.layer.scaling

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        assert self.layer.absorb_basis is not None
        return *self.layer.absorb_basis, self.starts, self.absorbed, self.constant, self.begin, self.until

    def joined(self, warps: int) -> JoinedPrograms:
        """The same in another launch, whose programs have so many warps."""
        blocks = self.layer.absorb_shape_of_append()
        shared, constants = self._shared(blocks, warps), self.layer.absorb_constants(blocks, stages=1)
        around = shared, self.max_blocks, self.starts_blocks, self.scale
        return JoinedPrograms(shared * self.queries, self._tensors, *around, constants)

    def _shared(self, blocks: int, warps: int) -> int:
        """Programs of so many warps that share the blocks of one query, each so many blocks at a time."""
        sms = sm_count(self.begin.device)
        return absorbing_programs(-(-self.max_blocks // blocks), self.queries * warps, sms)

    def launch(self, query: Tensor) -> None:
        """Absorb queries, [tokens, num_heads, head_dim], rotated."""
        layer = self.layer
        blocks, warps, stages = layer.absorb_shape(self.queries >= sm_count(query.device))
        align = math.gcd(16, query.stride(0), query.stride(1))
        grid = self._shared(blocks, warps), layer.shape.num_heads, len(self.begin) * self.tokens
        absorb_kernel[grid](
            query, *self._tensors, self.begin if self.query_start is None else self.query_start, self.max_blocks,
            query.stride(0) // align, query.stride(1) // align, self.starts_blocks, self.scale, ALIGN=align,
            TOKENS=self.tokens, enable_fp_fusion=True, num_warps=warps, num_stages=stages,
            **layer.absorb_constants(blocks, stages),
        )  # fmt: skip


def absorbing_programs(chunks: int, warps: int, sms: int) -> int:
    """Programs that share the blocks of one query: some for each SM, but few, as each reads the basis.

    Args:
        warps: of one program for each query.
    """
    return min(chunks, max(1, ABSORBING_WARPS * sms // warps))


def sequences_at_once(layer: DecodeLayer, batch_size: int, max_blocks: int, tokens: int) -> int:
    """Most sequences whose queries are absorbed by one launch, in equal parts of a batch."""
    if layer.folded:
        return batch_size
    rows = max_blocks * len(layer.layout.groups) * tokens * layer.group_rows
    most = ABSORBED_BYTES // (rows * layer.operands * layer.columns * layer.dtype.itemsize)
    most = max(1, min(batch_size, most))
    return -(-batch_size // -(-batch_size // most))


def block_starts(rotation: Rotation, layout: LayerLayout) -> Tensor:
    """cos and sin of the positions where blocks begin, [blocks and some more, 2, planes and zeros], float32.

    Args:
        rotation: cos and sin by position, [positions, rotary_dim], of a layer in blocks; or of the blocks themselves,
            [batch_size or 1, blocks, rotary_dim], which the result then begins with, too.
    """
    planes = rotation[0].shape[-1] // 2
    of_blocks = [beginnings_of(table, layout.rope_block)[..., :planes].float() for table in rotation]
    starts = torch.stack(of_blocks, dim=-2)
    chunk = absorbed_at_a_time(planes)
    starts = pad(starts, -(-2 * planes // chunk) * chunk // 2)
    return pad_rows(starts, -3, starts.shape[-3] + MOST_BLOCKS).contiguous()


def absorbed_at_a_time(planes: int) -> int:
    """Dimensions that a product of `absorb` takes at a time: 64, or 32 where that leaves fewer empty."""
    return 64 if -2 * planes % 64 < 32 else 32


def pad(x: Tensor, columns: int) -> Tensor:
    """Fill up the last dimension of a tensor with zeros."""
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1]))


def pad_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """Fill up a dimension of a tensor with zeros."""
    return pad(x.movedim(dim, -1), rows).movedim(-1, dim)
