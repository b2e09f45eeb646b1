"""Warp instructions that attention issues per key, by the width of a row.

They were counted in machine code (`python artifacts/gpu count`).

Between the widths counts are those of the next wider one, beyond them they grow in proportion.
"""

from __future__ import annotations

from functools import lru_cache

from ...checkpoint.layout import AttentionShape, GroupLayout, LayerLayout
from ...checkpoint.rows import WORD_NIBBLES, CodedRow, Row

DECODING = {64: 7.9, 128: 10.8, 256: 16.7, 512: 29.9}
"""Instructions of decoding a key of a group by the nibbles, or numbers, of its row, for up to 8 query rows (sm_90)."""

MORE_ROWS = 0.3
"""Share of them that each further 8 query rows add."""

ABSORBING = {64: 0.39, 128: 0.45, 256: 0.6, 512: 0.93}
"""Instructions of absorbing a query head once in 64 positions, a key (sm_90)."""

SPLIT_LANE = 0.2
"""Share of instructions that a split lane adds."""


@lru_cache(maxsize=1 << 14)
def group_instructions(layout: LayerLayout, group: GroupLayout, shape: AttentionShape) -> float:
    """Warp instructions of a decode step for one cached key of a group, for all of its query heads."""
    heads = len(group.kv_heads) * shape.heads_per_kv
    sides = [_decoding(row) for row in (group.key, group.values)]
    total = sum(sides) / len(sides) * (1 + MORE_ROWS * (-(-heads // 8) - 1))
    return total + (heads * _at(ABSORBING, _width(group.key)) * 64 / layout.rope_block if layout.rope_block else 0.0)


def _decoding(row: Row) -> float:
    split = row.split if isinstance(row, CodedRow) else 0
    return _at(DECODING, _width(row)) * (1 + SPLIT_LANE * split)


def _width(row: Row) -> int:
    """Nibbles, or numbers, of a row."""
    return WORD_NIBBLES * row.words if isinstance(row, CodedRow) else row.rank


def _at(counts: dict[int, float], width: int) -> float:
    wider = min((size for size in counts if size >= width), default=max(counts))
    return counts[wider] * max(1.0, width / wider)
