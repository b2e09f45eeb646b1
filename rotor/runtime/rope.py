"""RoPE of a layer in one pass: tables of cosines and sines, and how each form of keys uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.families import Family
from ..checkpoint.layout import PRE_ROPE, AttentionShape, KeyForm, LayerLayout
from ..kernels.passes import Pass, TokenSpan
from ..kernels.rotary import Rotation, relative, when_read, within_blocks
from .positions import check_positions, rotations_of_blocks

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

TABLE_ROWS = 1024
"""Rows by which a table of cosines and sines grows."""


class Rotations(NamedTuple):
    """cos and sin, each broadcastable to [batch_size, heads, tokens, rotary_dim]; None where nothing is rotated.

    query: of new queries. stored: of new keys as the cache keeps them. read: of all keys when they are read, see
        `reference.attention`. Kernels compute these three from `table` where `query` is None.
    table: [positions, rotary_dim]. In blocks position 0 is the beginning of the first key's block; otherwise there is
        a row for each new token. Beside `query`: of the beginnings of blocks, [batch_size or 1, blocks, rotary_dim].
    places: in blocks, rows of `table` of the new tokens, [seq_len].
    first: in blocks, the row of the first key.
    given: of new tokens as the model was given positions, where these may count from another token than `query` does.
    weights: what rotated queries and keys are multiplied by, [head_dim] each; None where by nothing.
    """

    query: Rotation | None = None
    stored: Rotation | None = None
    read: Rotation | None = None
    table: Rotation | None = None
    places: Tensor | None = None
    first: int = 0
    given: Rotation | None = None
    weights: tuple[Tensor | None, Tensor | None] = (None, None)


def rows_of(rotation: Rotation, rows: slice | Tensor) -> Rotation:
    """Select some positions of cos and sin: [*rows, rotary_dim] each.

    Args:
        rotation: as `Rotations.read`. rows: where rotations are of sequences, [batch_size, ...].
    """
    if rotation[0].dim() == 2:
        return rotation[0][rows], rotation[1][rows]
    assert isinstance(rows, Tensor)
    sequence = torch.arange(len(rows), device=rows.device).view(-1, *[1] * (rows.dim() - 1))
    of_sequences = (table[:, 0] if table.dim() == 4 else table for table in rotation)
    cos, sin = (table.expand(len(rows), -1, -1)[sequence, rows] for table in of_sequences)
    return cos, sin


def is_same(by_index: Rotation, given: Rotation) -> bool:
    """Tell whether the rotation by index is the one that the model was given; False on a device, whose answer would be
    waited for."""
    if by_index[0].device.type != "cpu":
        return False
    return all(torch.equal(a.expand_as(b), b) for a, b in zip(by_index, given, strict=True))


class RotaryTable:
    """Cosines and sines by index in the cache, from the model's own rotary embedding, shared by the layers of a type.

    Args:
        rotary: the model's embedding, which stays where it is. rotation: `Family.rotation` of what that gives.
        layer_type: passed to the embedding, where it takes one.

    layer_type: as given. depends_on_length: whether frequencies do, so that a key's are those of the pass that it came
        with, and no table holds for all. Otherwise positions may count from the first key that the cache still holds,
        since only differences matter.
    """

    def __init__(
        self, rotary: nn.Module, layer_type: str | None = None, rotation: Callable[[Rotation], Rotation] = lambda x: x
    ) -> None:
        self._rotary, self._rotation, self.layer_type = rotary, rotation, layer_type
        self._arguments = () if layer_type is None else (layer_type,)
        kinds: Any = rotary.rope_type
        kind = kinds if layer_type is None else kinds[layer_type]
        self.depends_on_length = kind == "longrope" or "dynamic" in kind
        self._key: tuple[torch.device, torch.dtype] | None = None
        self._table: Rotation | None = None
        self._read: dict[KeyForm, Rotation] = {}

    def __call__(self, length: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """Compute cos and sin, each [at least length, rotary_dim], of positions from 0 on."""
        key = device, dtype
        if key != self._key or self._table is None or len(self._table[0]) < length:
            rows = -(-int(length) // TABLE_ROWS) * TABLE_ROWS  # a step of decoding adds one key: not a new table each
            positions = torch.arange(rows, device=device)
            like = torch.empty(0, device=device, dtype=dtype)
            cos, sin = self._rotation(self._rotary(like, positions[None], *self._arguments))
            self._key, self._table, self._read = key, (cos[0].to(device), sin[0].to(device)), {}
        return self._table

    def when_read(self, form: KeyForm) -> Rotation:
        """`kernels.rotary.when_read` of the latest table, made once."""
        assert self._table is not None
        if form not in self._read:
            self._read[form] = when_read(self._table, form)
        return self._read[form]


def rotary_tables(network: nn.Module, family: Family, config: PreTrainedConfig) -> list[RotaryTable | None]:
    """The table of each layer of a causal model, shared by layers of a type; None without RoPE."""
    without_rope = family.without_rope(config.get_text_config())
    rotates = [family.rotary is not None and layer not in without_rope for layer in family.placed]
    if family.rotary is None or not any(rotates):
        return [None for _ in rotates]
    kinds = [family.rotary_type(config, layer) for layer in range(len(rotates))]
    rotary = network.get_submodule(family.rotary)
    tables = {kind: RotaryTable(rotary, kind, family.rotation) for kind in kinds}
    return [tables[kind] if rotating else None for rotating, kind in zip(rotates, kinds, strict=True)]


class RopeCall(NamedTuple):
    """A pass that a layer asks rotations for.

    given: cos and sin that the model passes to attention, [batch_size or 1, seq_len, rotary_dim] each.
    like: a tensor of the pass. kernels: the kernels serve it. cache: that the keys go into.
    """

    now: Pass
    given: Rotation | None
    like: Tensor
    kernels: bool
    cache: Cache | None


class NoRope:
    """A model without RoPE: nothing is rotated."""

    def __call__(self, asked: RopeCall) -> Rotations:
        """The rotations of a pass."""
        return Rotations()

    def check(self, asked: RopeCall, positions: Tensor | None, mask: Tensor | None, batch_size: int) -> None:
        """Check that keys are rotated by the positions that the model was given; raises UsageError if not."""


class PostRope(NoRope):
    """Queries and keys are rotated by the positions that the model is given, and keys are stored so."""

    def __call__(self, asked: RopeCall) -> Rotations:
        assert asked.given is not None
        cos, sin = asked.given
        if asked.kernels:
            return Rotations(table=(cos.flatten(0, 1), sin.flatten(0, 1)))
        rotation = cos.unsqueeze(1), sin.unsqueeze(1)
        return Rotations(rotation, rotation)


class InBlocks(NoRope):
    """Keys in blocks: positions are indices in the cache, as in the mask; only differences matter to RoPE.

    with_exact: the layer has exact tokens.
    """

    def __init__(self, form: KeyForm, table: RotaryTable, with_exact: bool) -> None:
        assert form.rope_block is not None
        self.form, self.block, self.table, self.with_exact = form, form.rope_block, table, with_exact

    def __call__(self, asked: RopeCall) -> Rotations:
        key = "rotations", self.table, self.block, self.with_exact, asked.kernels, asked.like.dtype
        return asked.now.once(key, lambda: self._made(*asked[:4]))

    def _made(self, now: Pass, given: Rotation | None, like: Tensor, kernels: bool) -> Rotations:
        """Where a window has dropped the first keys, rows may begin within a block; the table begins with the block.

        Exact keys are rotated by the table, too, whatever the model was given: then it begins at index 0 in all passes.
        """
        span = now.span
        first = span.kv_offset if self.with_exact else span.kv_offset % self.block
        start = span.kv_offset - first
        index = span.indices
        if index is None:
            index = torch.arange(span.seq_len, device=like.device) + (span.query_offset - start)
        dtype = torch.float32 if kernels else like.dtype  # kernels compose rotations, so these must be exact
        table = self.table(first + span.kv_len, like.device, dtype)
        if kernels:
            return Rotations(table=table, places=index, first=first)
        read = self.table.when_read(self.form)
        stored = None if self.form == PRE_ROPE else within_blocks(table, index, self.form)
        query, rows = rows_of(table, index), slice(first, first + span.kv_len)
        as_given = None if given is None else (given[0].unsqueeze(1), given[1].unsqueeze(1))
        return Rotations(query, stored, rows_of(read, rows), table, given=as_given)

    def check(self, asked: RopeCall, positions: Tensor | None, mask: Tensor | None, batch_size: int) -> None:
        span = asked.now.span
        if positions is not None and span.indices is None:  # else parallel.forward compares all tokens at once
            given, where = positions, (asked.cache, batch_size, span.query_offset, span.kv_offset)
            asked.now.once(("positions", self.table), lambda: check_positions(given, mask, *where))


class BlocksAsGiven(NoRope):
    """Keys in blocks of a model whose rotations do not follow from a token's place in the cache.

    A key is stored relative to its block's first token, whose rotation the cache keeps as the model gave it. So each
    key is read as it was rotated when it came, whatever the model rotates later ones by.
    """

    def __init__(self, form: KeyForm, layer_type: str | None) -> None:
        assert form.rope_block is not None
        self.form, self.block, self.layer_type = form, form.rope_block, layer_type

    def __call__(self, asked: RopeCall) -> Rotations:
        assert asked.given is not None
        given, key = asked.given, ("rotations", self.layer_type, self.block, asked.kernels)
        return asked.now.once(key, lambda: self._made(asked.now.span, given, asked.cache, asked.kernels))

    def _made(self, span: TokenSpan, given: Rotation, cache: Cache | None, kernels: bool) -> Rotations:
        cos, sin = given
        begun = rotations_of_blocks(given, self.block, span, cache, self.layer_type)
        whole, stored = (cos.unsqueeze(1), sin.unsqueeze(1)), None
        if self.form != PRE_ROPE:
            new = torch.arange(span.seq_len, device=cos.device) + span.query_offset
            stored = relative(whole, _rotation(begun[:, None, new // self.block]))
        if kernels:
            return Rotations(whole, stored, table=_rotation(begun.float()), first=span.kv_offset)
        keys = torch.arange(span.kv_len, device=cos.device) + span.kv_offset
        read = _rotation(begun[:, keys // self.block])
        if not isinstance(span.kv_offset, int) or span.kv_offset % self.block:
            read = read[0].unsqueeze(1), read[1].unsqueeze(1)  # rows begin within a block: in any order
        return Rotations(whole, stored, read)


def _rotation(planes: Tensor) -> Rotation:
    """cos and sin, [..., rotary_dim] each, of those of planes, [..., 2, planes]."""
    cos, sin = torch.cat([planes, planes], -1).unbind(-2)
    return cos, sin


def rope_of(layout: LayerLayout, shape: AttentionShape, table: RotaryTable | None) -> NoRope:
    """Choose how a layer's queries and keys are rotated."""
    if table is None:
        return NoRope()
    if layout.rope_block is None:
        return PostRope()
    if table.depends_on_length or shape.rotates_as_told:
        return BlocksAsGiven(layout.form, table.layer_type)
    return InBlocks(layout.form, table, layout.exact is not None)
