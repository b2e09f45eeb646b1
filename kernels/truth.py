"""Float64 attention over ragged groups, written for reading: what every fast path is tested against.

Nothing is batched: one loop over sequences, groups, and heads, so that each line is the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.format.layout import LayerLayout

from .reference import rotate


@dataclass(frozen=True)
class Sequence:
    """One sequence of a batch: its new queries are the last `query_len` of the keys `kv_start ... kv_end - 1`.

    Keys before `kv_start` (left padding) and from `kv_end` on (the empty rest of a static cache) are never attended.
    """

    query_len: int
    kv_start: int
    kv_end: int


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    scaling: float,
    sequences: list[Sequence],
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of all query heads of a layer, and its log-sum-exp, in float64.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated; in domain `none` [batch_size, seq_len, sum over
            query heads of qk_rank]. Only the first `query_len` positions of a sequence are used.
        key, value: packed rows, [batch_size, kv_len, qk_width] and [batch_size, kv_len, v_width]; with a block table
            [num_pages, page_size, qk_width] and [num_pages, page_size, v_width].
        heads_per_kv: query heads per KV head.
        scaling: factor on the logits.
        sequences: one per batch row.
        query_basis: [group_size * head_dim, qk_width], except in domain `none`.
        key_rotation: cos and sin [at least the longest kv_end, head_dim] by index in the cache, in domain `pre`.
        block_table: [batch_size, pages of a sequence], the page of each run of page_size keys.
        window: a query attends to itself and the window - 1 keys before it.
        softcap: logits become softcap * tanh(logits / softcap).
        mask: [batch_size, seq_len, kv_len], bool; where False, nothing is attended, on top of what is causal.
    Returns:
        The output [batch_size, seq_len, sum over query heads of v_rank], and the natural log-sum-exp of the logits
        [batch_size, num_heads, seq_len]. Queries that attend to nothing, and those behind `query_len`, give zeros and
        minus infinity.
    Source: docs/design.md.
    """
    size = layout.group_size
    group_rows = size * heads_per_kv
    seq_len = query.shape[1] if layout.domain == "none" else query.shape[2]
    output = torch.zeros(len(sequences), seq_len, group_rows * layout.v_width, dtype=torch.float64)
    lse = torch.full((len(sequences), group_rows * len(layout.groups), seq_len), -torch.inf, dtype=torch.float64)
    for b, sequence in enumerate(sequences):
        index = torch.arange(sequence.kv_end, device="cpu")
        position = torch.arange(sequence.query_len)[:, None] + sequence.kv_end - sequence.query_len
        allowed = (index >= sequence.kv_start) & (index <= position)
        if window is not None:
            allowed &= index > position - window
        if mask is not None:
            allowed &= mask[b, : sequence.query_len, : sequence.kv_end].cpu()
        key_rows = _rows(key, b, sequence, block_table)
        value_rows = _rows(value, b, sequence, block_table)
        for g, (group, (qk_offset, v_offset)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
            latent = key_rows[:, qk_offset : qk_offset + group.qk_rank]
            values = value_rows[:, v_offset : v_offset + group.v_rank]
            for row in range(group_rows):
                head = g * group_rows + row
                queries, keys = _queries_and_keys(
                    query, latent, layout, b, head, row, heads_per_kv, qk_offset, query_basis, key_rotation
                )
                logits = queries[: sequence.query_len] @ keys.T * scaling
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                logits = logits.masked_fill(~allowed, -torch.inf)
                probabilities = torch.softmax(logits, dim=-1).nan_to_num()  # a row of minus infinities has no softmax
                column = group_rows * v_offset + row * group.v_rank
                output[b, : sequence.query_len, column : column + group.v_rank] = probabilities @ values
                lse[b, head, : sequence.query_len] = torch.logsumexp(logits, dim=-1)
    return output, lse


def _rows(cache: Tensor, b: int, sequence: Sequence, block_table: Tensor | None) -> Tensor:
    """[kv_end, width] in float64; keys that are never attended are zeros, whatever the cache holds there."""
    rows = cache[b] if block_table is None else cache[block_table[b].long()].flatten(0, 1)
    rows = rows[: sequence.kv_end].cpu().double()
    rows[: sequence.kv_start] = 0.0
    return rows


def _queries_and_keys(
    query: Tensor,
    latent: Tensor,
    layout: LayerLayout,
    b: int,
    head: int,
    row: int,
    heads_per_kv: int,
    qk_offset: int,
    query_basis: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """What one query head multiplies, [seq_len, width] and [kv_len, width]; `row` counts its heads in its group."""
    rank = latent.shape[1]
    if layout.domain == "none":
        column = layout.group_size * heads_per_kv * qk_offset + row * rank
        return query[b, :, column : column + rank].cpu().double(), latent
    assert query_basis is not None
    head_dim = query_basis.shape[0] // layout.group_size
    first = row // heads_per_kv * head_dim
    basis = query_basis[first : first + head_dim, qk_offset : qk_offset + rank].cpu().double()
    queries = query[b, head].cpu().double()
    if layout.domain == "post":
        return queries @ basis, latent
    assert key_rotation is not None
    cos, sin = (table[: latent.shape[0]].cpu().double() for table in key_rotation)
    return queries, rotate(latent @ basis.T, cos, sin)
