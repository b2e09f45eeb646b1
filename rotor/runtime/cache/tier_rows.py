"""Rows of a compressed layer cut to fewer columns: the prefix of each group that a tier of tokens keeps.

Columns are nested, most valuable first (of codes: most bits first), so that the beginning of a group's row serves the
smaller rank. A column that is cut counts as 0: of a code, that is half a step above the column's mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...format.columns import WIDTHS, WORD_BYTES, Columns, columns_per_word
from ...format.layout import GroupLayout, LayerLayout

STORED_BYTES = 2
"""Of a column of 16 bits: shares are those of a checkpoint as it is served, whatever dtype it runs in."""


@dataclass(frozen=True)
class TierRows:
    """Where what a tier keeps of a layer lies in the whole of it.

    layout: of the tier's rows. key, value: the elements (of codes: bytes) of the rows they are cut from, [kept], int64.
    basis: columns of the layer's query basis. query: of queries that come projected (domain `none`), in the last
    dimension. output: places of the tier's outputs among the layer's.
    """

    layout: LayerLayout
    key: Tensor
    value: Tensor
    basis: Tensor
    query: Tensor
    output: Tensor


def cut_layout(layout: LayerLayout, qk_ratio: float, v_ratio: float) -> LayerLayout:
    """The layout of rows without a share of each group's bytes, from its end: to the nearest whole column (of codes:
    word; of rotary planes: pair), at least one."""
    return replace(layout, groups=tuple(_cut_group(group, qk_ratio, v_ratio) for group in layout.groups))


def _cut_group(group: GroupLayout, qk_ratio: float, v_ratio: float) -> GroupLayout:
    if group.qk_columns is not None and group.v_columns is not None:
        columns = _cut_columns(group.qk_columns, qk_ratio), _cut_columns(group.v_columns, v_ratio)
        return GroupLayout.coded(group.kv_heads, *columns)
    step = 2 if group.planes else 1
    qk_rank, v_rank = _kept(group.qk_rank, qk_ratio, step), _kept(group.v_rank, v_ratio, 1)
    return replace(group, qk_rank=qk_rank, v_rank=v_rank, planes=group.planes[: qk_rank // 2])


def _cut_columns(columns: Columns, ratio: float) -> Columns:
    left = _kept(columns.row_bytes(STORED_BYTES), ratio, WORD_BYTES) // WORD_BYTES
    counts = []
    for bits, count in zip(WIDTHS, columns.counts, strict=True):
        words = min(left, count // columns_per_word(bits))
        counts.append(words * columns_per_word(bits))
        left -= words
    return Columns(*counts)


def _kept(whole: int, ratio: float, step: int) -> int:
    return max(step, int((1 - ratio) * whole / step + 0.5) * step)


@lru_cache(maxsize=1024)
def tier_rows(whole: LayerLayout, outer: LayerLayout, inner: LayerLayout, heads_per_kv: int, size: int) -> TierRows:
    """What a tier keeps of rows that are cut already.

    Args:
        whole: the layer's. outer: of the rows that are cut; inner: of what is left, each group a beginning of outer's.
        heads_per_kv: query heads of a KV head. size: bytes of a number of the model's dtype.
    """
    unit = 1 if whole.coded else size
    stored, kept = ([group.row_bytes(size) for group in layout.groups] for layout in (outer, inner))
    key, value = (_beginnings([s[side] // unit for s in stored], [k[side] // unit for k in kept]) for side in (0, 1))
    heads = whole.group_size * heads_per_kv
    qk, v = ([(group.qk_rank, group.v_rank)[side] for group in whole.groups] for side in (0, 1))
    own_qk, own_v = ([(group.qk_rank, group.v_rank)[side] for group in inner.groups] for side in (0, 1))
    return TierRows(
        inner,
        key,
        value,
        _beginnings(qk, own_qk),
        _beginnings(_each(qk, heads), _each(own_qk, heads)),
        _beginnings(_each(v, heads), _each(own_v, heads)),
    )


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
