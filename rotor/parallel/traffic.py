"""Bytes that a prompt and a token send over the wire, from layouts alone: what `Wire.sent` counts, and alternatives.

All are sums over the processes; what a process keeps for itself is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..format.channels import Numbers
from ..format.layout import AttentionShape, GroupLayout, LayerLayout


@dataclass(frozen=True)
class Traffic:
    """Bytes that are sent, by what they are: queries, rows (keys and values) and outputs."""

    queries: int = 0
    rows: int = 0
    outputs: int = 0

    @property
    def total(self) -> int:
        return self.queries + self.rows + self.outputs


def of_rows(row_bytes: int, tokens: int, processes: int) -> Traffic:
    """Every process's rows to all the others, as `sequence_parallel` sends a prompt (batch of one), or past them in a
    ring.

    Args:
        row_bytes: of the keys and values of one token over all layers.
    """
    return Traffic(rows=(processes - 1) * tokens * row_bytes)


def of_heads(
    layouts: Sequence[LayerLayout], shape: AttentionShape, tokens: int, processes: int, element_bytes: int
) -> Traffic:
    """Ulysses: queries and rows to where their heads are, outputs back, heads shared out evenly. Queries are absorbed,
    as wide as their keys' latents, but where keys are stored in blocks.

    Source: ZDC section 5.3, figure 18.
    """
    queries = outputs = 0
    for layout in layouts:
        for group in layout.groups:
            heads = layout.group_size * shape.heads_per_kv
            queries += heads * (shape.head_dim if layout.in_blocks else group.key.width)
            outputs += heads * group.values.width
    rows = sum(sum(layout.row_bytes(element_bytes)) for layout in layouts)
    each = (element_bytes * queries, rows, element_bytes * outputs)
    return Traffic(*(size * tokens * (processes - 1) // processes for size in each))


def uncompressed(shape: AttentionShape) -> list[LayerLayout]:
    """The layers of a model as they are without compression: every KV head a group of its own, of full rank."""
    whole = Numbers(shape.head_dim)
    groups = tuple(GroupLayout((i,), whole, whole) for i in range(shape.num_kv_heads))
    return [LayerLayout(groups)] * shape.num_layers


def of_token(layouts: Sequence[LayerLayout], shape: AttentionShape, processes: int, element_bytes: int) -> int:
    """What all processes send to decode one token: outputs and log-sum-exps, float32 or wider, from each to each."""
    heads = [layout.group_size * shape.heads_per_kv for layout in layouts]
    numbers = sum(n * sum(g.values.width + 1 for g in layout.groups) for n, layout in zip(heads, layouts, strict=True))
    return processes * (processes - 1) * numbers * max(element_bytes, 4)
