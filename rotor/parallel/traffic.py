"""Bytes that a prompt and a token send over the wire, from layouts alone: what `Wire.sent` counts.

All are sums over the processes; what a process keeps for itself is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..format.layout import AttentionShape, LayerLayout


def of_prompt(row_bytes: int, tokens: int, processes: int) -> int:
    """Every process's rows to all the others, as `sequence_parallel` sends a prompt (batch of one), or past them in a
    ring.

    Args:
        row_bytes: of the keys and values of one token over all layers.
    """
    return (processes - 1) * tokens * row_bytes


def of_token(layouts: Sequence[LayerLayout], shape: AttentionShape, processes: int, element_bytes: int) -> int:
    """What all processes send to decode one token: outputs and log-sum-exps, float32 or wider, from each to each."""
    heads = [layout.group_size * shape.heads_per_kv for layout in layouts]
    numbers = sum(n * sum(g.values.width + 1 for g in layout.groups) for n, layout in zip(heads, layouts, strict=True))
    return processes * (processes - 1) * numbers * max(element_bytes, 4)
