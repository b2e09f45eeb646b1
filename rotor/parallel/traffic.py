"""Bytes that a prompt and a token send over the wire, from layouts alone: what `Wire.sent` counts, and alternatives.

All are sums over the processes; what a process keeps for itself is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..format.channels import Numbers
from ..format.layout import AttentionShape, GroupLayout, LayerLayout
from .plan import LayerPlan, Traffic, plan_layer, token_runs


def of_prompt(
    layouts: Sequence[LayerLayout],
    shape: AttentionShape,
    tokens: int,
    processes: int,
    element_bytes: int,
    exchange: str = "auto",
) -> Traffic:
    """What `sequence_parallel` sends for a prompt (batch of one), over the layers of a model.

    Args:
        tokens: at least two a process. exchange: as in `sequence_parallel`.
    """
    lengths = [sum(map(len, runs)) for runs in token_runs(tokens, processes)]
    whole = Traffic()
    for layout in layouts:
        plan = plan_layer(layout, shape, element_bytes, processes)
        rows = exchange == "rows" or (exchange == "auto" and plan.rows_alone)
        whole += _by_rows(sum(layout.row_bytes(element_bytes)), lengths) if rows else _by_heads(plan, lengths)
    return whole


def _by_heads(plan: LayerPlan, lengths: list[int]) -> Traffic:
    """Queries and rows to where their heads are, outputs back."""
    sizes = [plan.sizes(process) for process in range(len(lengths))]
    every, sent, busiest = sum(sizes, Traffic()), Traffic(), 0
    for length, size in zip(lengths, sizes, strict=True):
        others, inputs = sum(lengths) - length, size.queries + size.rows
        sent += Traffic(others * size.queries, others * size.rows, others * size.outputs)
        outward = length * (every.queries + every.rows - inputs) + others * size.outputs
        busiest = max(busiest, outward, others * inputs + length * (every.outputs - size.outputs))
    return sent + Traffic(busiest_bytes=busiest)


def _by_rows(row_bytes: int, lengths: list[int]) -> Traffic:
    """Every process's rows to all the others."""
    count, tokens = len(lengths), sum(lengths)
    busiest = max(max((count - 1) * length, tokens - length) for length in lengths)
    return Traffic(rows=(count - 1) * tokens * row_bytes, busiest_bytes=busiest * row_bytes)


def of_ring(row_bytes: int, tokens: int, processes: int) -> Traffic:
    """Ring attention: queries and outputs stay, rows go round, each past every process.

    Args:
        row_bytes: of the keys and values of one token over all layers.
    """
    lengths = [sum(map(len, runs)) for runs in token_runs(tokens, processes)]
    busiest = tokens - min(lengths) if processes > 1 else 0
    return Traffic(rows=(processes - 1) * tokens * row_bytes, busiest_bytes=busiest * row_bytes)


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
