"""RoPE of a layer in one pass, for each of the forms that its keys may have; chosen when the layer is made."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..format.layout import AttentionShape, KeyForm, LayerLayout
from ..kernels.rotary import Rotation, within_blocks
from .rotary_table import RotaryTable, rows_of


class Place(NamedTuple):
    """Where the tokens of a pass lie in the cache.

    query_offset: index of the first new token, and seq_len their number. kv_offset: index of the first key that is
    seen, and kv_len the number of these. indices: of new tokens, where they are not neighbours.
    """

    query_offset: Any
    seq_len: int
    kv_offset: Any
    kv_len: int
    indices: Tensor | None = None


class Rotations(NamedTuple):
    """cos and sin, each broadcastable to [batch_size, heads, tokens, rotary_dim]; None where nothing is rotated.

    query: of new queries. stored: of new keys as the cache keeps them. read: of all keys when they are read.
    Kernels have these made, from `table` [positions, rotary_dim]: in blocks by place from the beginning of the first
    key's block on, else of the new tokens one after the other. places: in blocks, of new tokens, [seq_len]. first: in
    blocks, the place of the first key.
    """

    query: Rotation | None = None
    stored: Rotation | None = None
    read: Rotation | None = None
    table: Rotation | None = None
    places: Tensor | None = None
    first: int = 0


class NoRope:
    """Nothing is rotated."""

    fits_kernels = True

    def __call__(self, place: Place, given: Rotation | None, like: Tensor, kernels: bool) -> Rotations:
        return Rotations()

    def check(
        self, positions: Tensor | None, mask: Tensor | None, cache: Any, layer_idx: int, batch_size: int, place: Place
    ) -> None:
        """Raises UsageError where keys would be rotated by other positions than the model was given."""


class PostRope(NoRope):
    """Queries and keys are rotated by the positions that the model is given, and stay so."""

    def __call__(self, place: Place, given: Rotation | None, like: Tensor, kernels: bool) -> Rotations:
        assert given is not None
        if kernels:
            return Rotations(table=(given[0].flatten(0, 1), given[1].flatten(0, 1)))
        rotation = given[0].unsqueeze(1), given[1].unsqueeze(1)
        return Rotations(rotation, rotation)


class InBlocks(NoRope):
    """Positions are indices in the cache: what the mask goes by, and only differences matter to RoPE."""

    def __init__(self, form: KeyForm, table: RotaryTable, all_fast: bool) -> None:
        assert form.rope_block is not None
        self.form, self.table, self.all_fast = form, table, all_fast
        self.block = 1 if all_fast else form.rope_block
        self.fits_kernels = not table.depends_on_length

    def __call__(self, place: Place, given: Rotation | None, like: Tensor, kernels: bool) -> Rotations:
        """Where a window has let go of the first keys, rows may begin within a block: the table begins with it."""
        first = place.kv_offset % self.block
        start = place.kv_offset - first
        index = place.indices
        if index is None:
            index = torch.arange(place.seq_len, device=like.device) + (place.query_offset - start)
        end = place.query_offset + place.seq_len
        dtype = torch.float32 if kernels else like.dtype  # kernels compose rotations, and so want them exact
        table = self.table(start, first + place.kv_len, end, like.device, dtype)
        if kernels:
            return Rotations(table=table, places=index, first=first)
        read = table if self.all_fast else self.table.when_read(self.form)
        stored = None if self.all_fast else within_blocks(table, index, self.form)
        return Rotations(rows_of(table, index), stored, rows_of(read, slice(first, first + place.kv_len)))

    def check(
        self, positions: Tensor | None, mask: Tensor | None, cache: Any, layer_idx: int, batch_size: int, place: Place
    ) -> None:
        if place.indices is None:  # else they are compared as a whole, by whoever spread the tokens
            where = layer_idx, batch_size, place.query_offset, place.kv_offset
            self.table.check_positions(positions, mask, cache, *where)


def rope_of(layout: LayerLayout, shape: AttentionShape, table: RotaryTable | None) -> NoRope:
    """How a layer's queries and keys are rotated."""
    if table is None:
        return NoRope()
    if layout.rope_block is None:
        return PostRope()
    return InBlocks(layout.form, table, layout.fast_planes == shape.rotary_planes)
