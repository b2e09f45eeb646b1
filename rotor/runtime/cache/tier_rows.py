"""Rows of a compressed layer cut for a tier of tokens: to the prefix of each group's columns, or to fewer bits.

Columns are nested, most valuable first (of codes: most bits first), so that the beginning of a group's row serves the
smaller rank. A column that is cut counts as 0, of codes as its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ...format.columns import WIDTHS, WORD_BYTES, Columns, columns_per_word
from ...format.layout import GroupLayout, LayerLayout
from ...kernels.rows import key_columns, value_columns
from .tier_bits import BitCut, narrowed, reading

STORED_BYTES = 2
"""Of a column of 16 bits: shares are those of a checkpoint as it is served, whatever dtype it runs in."""

Cut = Callable[[Tensor], Tensor]
"""Rows [..., elements, of codes bytes] -> what a tier keeps of them."""


@dataclass(frozen=True)
class TierRows:
    """What a tier keeps of a layer's rows, and how attention reads it.

    layout: of the tier's rows. cut_key, cut_value: from the rows that they are cut from.
    basis: columns of the layer's query basis. query: of projected queries, in the last dimension. output: places of the
    tier's outputs among the layer's. All are [kept], int64.
    key_reading, value_reading: of codes that lost bits or columns, values once for each query head; None where numbers
    are read as they are. query_reading: that of keys, once for each query head.
    """

    layout: LayerLayout
    cut_key: Cut
    cut_value: Cut
    basis: Tensor
    query: Tensor
    output: Tensor
    key_reading: Reading | None
    query_reading: Reading | None
    value_reading: Reading | None


@dataclass(frozen=True)
class Reading:
    """Numbers of a tier in the steps of whole rows: n = factor n' + offset.

    factor: [the tier's width]. offset: [the layer's width]; of columns that are gone it is all. Both float32.
    """

    factor: Tensor
    offset: Tensor

    def for_heads(self, whole: Sequence[int], inner: Sequence[int], heads: int) -> Reading:
        """Once for each of the heads of a group.

        Args:
            whole, inner: widths of the layer's groups, and of the tier's.
        """
        factors = [part.repeat(heads) for part in self.factor.split(list(inner))]
        offsets = [part.repeat(heads) for part in self.offset.split(list(whole))]
        return Reading(torch.cat(factors), torch.cat(offsets))


def cut_layout(layout: LayerLayout, qk_ratio: float, v_ratio: float) -> LayerLayout:
    """The layout of rows without a share of each group's bytes, from its end: to the nearest whole column (of codes:
    word; of rotary planes: pair), at least one."""
    return replace(layout, groups=tuple(_cut_group(group, qk_ratio, v_ratio) for group in layout.groups))


def narrow_layout(
    whole: LayerLayout, qk_ratio: float, v_ratio: float, within: LayerLayout | None = None
) -> LayerLayout:
    """The layout of rows of codes without a share of each group's bytes, by fewer bits of its columns (`narrowed`).

    Args:
        within: rows that have lost bits already, of which it is then to be a part; by default whole ones.
    """
    groups = []
    for group, outer in zip(whole.groups, (within or whole).groups, strict=True):
        assert outer.qk_columns is not None
        assert outer.v_columns is not None
        sizes = group.row_bytes(STORED_BYTES)
        keys = narrowed(outer.qk_columns, round((1 - qk_ratio) * sizes[0]))
        values = None if group.joint else narrowed(outer.v_columns, round((1 - v_ratio) * sizes[1]))
        groups.append(GroupLayout.coded(group.kv_heads, keys, values))
    return replace(whole, groups=tuple(groups))


def _cut_group(group: GroupLayout, qk_ratio: float, v_ratio: float) -> GroupLayout:
    if group.qk_columns is not None and group.v_columns is not None:
        values = None if group.joint else _cut_columns(group.v_columns, v_ratio)
        return GroupLayout.coded(group.kv_heads, _cut_columns(group.qk_columns, qk_ratio), values)
    step = 2 if group.planes else 1
    qk_rank, v_rank = _kept(group.qk_rank, qk_ratio, step), _kept(group.v_rank, v_ratio, 1)
    return replace(group, qk_rank=qk_rank, v_rank=v_rank, planes=group.planes[: qk_rank // 2])


def _cut_columns(columns: Columns, ratio: float) -> Columns:
    return _beginning(columns, _kept(columns.row_bytes(STORED_BYTES), ratio, WORD_BYTES))


def _beginning(columns: Columns, size: int) -> Columns:
    """The columns in the first `size` bytes of a row, whole words."""
    left = size // WORD_BYTES
    counts = []
    for bits, count in zip(WIDTHS, columns.counts, strict=True):
        words = min(left, count // columns_per_word(bits))
        counts.append(words * columns_per_word(bits))
        left -= words
    return Columns(*counts)


def _kept(whole: int, ratio: float, step: int) -> int:
    return max(step, int((1 - ratio) * whole / step + 0.5) * step)


@lru_cache(maxsize=1024)
def tier_rows(
    whole: LayerLayout,
    outer: LayerLayout,
    inner: LayerLayout,
    heads_per_kv: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TierRows:
    """What a tier keeps of rows that are cut already.

    Args:
        whole: the layer's. outer: of the rows that are cut; inner: of what is left.
        heads_per_kv: query heads of a KV head. dtype: the model's. device: of the rows.
    """
    heads = whole.group_size * heads_per_kv
    qk, v = ([(group.qk_rank, group.v_rank)[side] for group in whole.groups] for side in (0, 1))
    own_qk, own_v = ([(group.qk_rank, group.v_rank)[side] for group in inner.groups] for side in (0, 1))
    key_reading, value_reading = _reading(whole, inner, "key", device), _reading(whole, inner, "value", device)
    return TierRows(
        inner,
        _cut(outer, inner, "key", dtype, device),
        _cut(outer, inner, "value", dtype, device),
        _beginnings(qk, own_qk).to(device),
        _beginnings(_each(qk, heads), _each(own_qk, heads)).to(device),
        _beginnings(_each(v, heads), _each(own_v, heads)).to(device),
        key_reading,
        None if key_reading is None else key_reading.for_heads(qk, own_qk, heads),
        None if value_reading is None else value_reading.for_heads(v, own_v, heads),
    )


Side = Literal["key", "value"]


def _columns(layout: LayerLayout, side: Side) -> list[Columns]:
    return key_columns(layout) if side == "key" else value_columns(layout)


def _cut(outer: LayerLayout, inner: LayerLayout, side: Side, dtype: torch.dtype, device: torch.device) -> Cut:
    before, after = _columns(outer, side), _columns(inner, side)
    if before == after and outer.coded:
        return _as_they_are
    if any(_beginning(a, b.row_bytes()) != b for a, b in zip(before, after, strict=True)):
        return BitCut.of(before, after, dtype, device)
    unit = 1 if outer.coded else dtype.itemsize
    index = 0 if side == "key" else 1
    stored, kept = ([group.row_bytes(dtype.itemsize)[index] // unit for group in x.groups] for x in (outer, inner))
    if stored == kept:
        return _as_they_are
    return _Beginnings(_beginnings(stored, kept).to(device))


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True)
class _Beginnings:
    index: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return rows[..., self.index]


def _reading(whole: LayerLayout, inner: LayerLayout, side: Side, device: torch.device) -> Reading | None:
    side = "key" if whole.joint else side
    pairs = list(zip(_columns(whole, side), _columns(inner, side), strict=True))
    if all(before == after for before, after in pairs):
        return None
    found = [reading(before, after) for before, after in pairs]
    factors, offsets = ([number for one in found for number in one[part]] for part in (0, 1))
    return Reading(torch.tensor(factors, device=device), torch.tensor(offsets, device=device))


def _each(sizes: Sequence[int], times: int) -> list[int]:
    return [size for size in sizes for _ in range(times)]


def _beginnings(blocks: Sequence[int], kept: Sequence[int]) -> Tensor:
    """Indices of the first `kept` entries of each of neighbouring blocks, [sum of kept] int64."""

    def indices() -> Iterator[int]:
        start = 0
        for size, own in zip(blocks, kept, strict=True):
            yield from range(start, start + own)
            start += size

    return torch.tensor(list(indices()), dtype=torch.int64)
