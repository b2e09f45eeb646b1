"""Bytes that a prompt and a token send over the wire, from layouts alone: what `Wire.sent` counts, and alternatives.

All are sums over the processes; what a process keeps for itself is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..format.layout import AttentionShape, GroupLayout, LayerLayout
from .plan import bounds, plan_layer


@dataclass(frozen=True)
class Traffic:
    """Bytes sent by all processes together.

    queries, rows, outputs: by what they are. busiest: what the process sends or receives, whichever is more, that sends
    or receives most: links carry both at once.
    """

    queries: int = 0
    rows: int = 0
    outputs: int = 0
    busiest: int = 0

    @property
    def total(self) -> int:
        return self.queries + self.rows + self.outputs

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.queries + other.queries,
            self.rows + other.rows,
            self.outputs + other.outputs,
            self.busiest + other.busiest,
        )


def by_heads(
    layouts: Sequence[LayerLayout], shape: AttentionShape, tokens: int, processes: int, element_bytes: int
) -> Traffic:
    """Ulysses over the layers of a model, as `sequence_parallel` runs it over a prompt (batch of one)."""
    lengths = [end - start for start, end in pairwise(bounds(tokens, processes))]
    whole = Traffic()
    for layout in layouts:
        plan = plan_layer(layout, shape.heads_per_kv, shape.head_dim, element_bytes, processes)
        sizes = [plan.sizes(process, element_bytes) for process in range(processes)]
        others = [tokens - length for length in lengths]
        there = [left * (size.queries + size.rows) for left, size in zip(others, sizes, strict=True)]
        back = [left * size.outputs for left, size in zip(others, sizes, strict=True)]
        all_there, all_back = sum(s.queries + s.rows for s in sizes), sum(s.outputs for s in sizes)
        loads = [
            (
                length * (all_there - size.queries - size.rows) + back[process],
                there[process] + length * (all_back - size.outputs),
            )
            for process, (length, size) in enumerate(zip(lengths, sizes, strict=True))
        ]
        whole += Traffic(
            sum(left * size.queries for left, size in zip(others, sizes, strict=True)),
            sum(left * size.rows for left, size in zip(others, sizes, strict=True)),
            sum(back),
            max(max(load) for load in loads),
        )
    return whole


def by_rows(row_bytes: int, tokens: int, processes: int) -> Traffic:
    """Ring attention: queries and outputs stay, every process's rows pass through all the others.

    Args:
        row_bytes: of the keys and values of one token over all layers.
    """
    lengths = [end - start for start, end in pairwise(bounds(tokens, processes))]
    most = max(tokens - min(lengths), 0) if processes > 1 else 0
    return Traffic(rows=(processes - 1) * tokens * row_bytes, busiest=most * row_bytes)


def uncompressed(shape: AttentionShape) -> list[LayerLayout]:
    """The layers of a model as they are without compression: every KV head a group of its own, of full rank."""
    groups = tuple(GroupLayout((i,), shape.head_dim, shape.head_dim) for i in range(shape.num_kv_heads))
    return [LayerLayout("none", True, groups)] * shape.num_layers


def decoding(layouts: Sequence[LayerLayout], shape: AttentionShape, processes: int, element_bytes: int) -> int:
    """What all processes send to decode one token: outputs and log-sum-exps, float32 or wider, from each to each."""
    heads = [layout.group_size * shape.heads_per_kv for layout in layouts]
    numbers = sum(n * sum(g.v_rank + 1 for g in layout.groups) for n, layout in zip(heads, layouts, strict=True))
    return processes * (processes - 1) * numbers * max(element_bytes, 4)
