"""Checks of the kernels against the float64 attention, shared by the interpreter's tests and those on a GPU."""

from __future__ import annotations

from collections.abc import Sequence as Values
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ragged import RaggedCase, paged
from torch import Tensor

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import LayerLayout
from rotor.kernels import reference
from rotor.kernels.decode.launch import decode_attention
from rotor.kernels.key_ranges import DecodeKeys, PrefillKeys
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.prefill.launch import prefill_attention
from rotor.kernels.reference import grouped_attention
from rotor.kernels.truth import Sequence, ragged_attention

FLOAT32_ERROR = 4e-6
"""Relative error allowed in float32, where PyTorch's own is around 5e-7 and the order of sums differs."""


def pairs(first: Values[Any], second: Values[Any], mark: pytest.MarkDecorator) -> list[Any]:
    """All pairs of two lists of parameters, with a mark on most: each value of both is in one without it."""
    step = min(len(first), len(second))
    return [
        pytest.param(a, b, marks=[mark] if (i - j) % step else [])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_lse(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Log-sum-exp by absolute error; minus infinity where nothing is attended."""
    empty = torch.isinf(expected)
    assert torch.equal(torch.isinf(got.cpu()), empty)
    difference = (got.cpu().double() - expected).masked_fill(empty, 0.0)
    assert float(difference.abs().max()) <= tolerance


def allowed_error(case: RaggedCase, exact: Tensor, mask: Tensor) -> float:
    """Twice the error of PyTorch in the case's dtype; `mask` is [batch_size, 1, seq_len, kv_len]."""
    rotation = None if case.key_rotation is None else tuple(t.to(case.key.dtype) for t in case.key_rotation)
    with patch.object(reference, "serves", return_value=False):  # the formula, not what a CPU does of it
        plain = grouped_attention(
            case.query,
            case.key.unsqueeze(1),
            case.value.unsqueeze(1),
            case.parameters(),
            rotation,  # type: ignore[arg-type]
            mask.to(case.key.device),
        )
    # PyTorch gives NaN for queries that attend to nothing in some of its kernels, zeros in others.
    return max(2.0 * relative_error(plain.nan_to_num(), exact.view_as(plain)), FLOAT32_ERROR)


def check_decode(
    case: RaggedCase,
    sequences: list[Sequence],
    *,
    schedule: str = "stream",
    programs: int | None = None,
    page_size: int = 0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    kernels: LayerKernels | None = None,
) -> None:
    """Decode one query of each sequence; keys outside of a sequence's range are poisoned with NaN.

    `mask` [batch_size, kv_len] goes to the kernel in place of the sequences' ranges, which it must lie in. `kernels`
    are the layer's launches, by default by rule.
    """
    layout, device = case.layout, case.key.device
    kv_len = case.key.shape[1]
    parts = layer_parts(layout, case.heads_per_kv, case.head_dim, kernels)
    full_mask = torch.zeros(len(sequences), kv_len, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        full_mask[b, sequence.kv_start : sequence.kv_end] = True
    if mask is not None:
        full_mask &= mask
    expected, expected_lse = ragged_attention(
        case.query,
        case.key,
        case.value,
        layout,
        case.heads_per_kv,
        case.scaling,
        sequences,
        case.query_basis,
        case.key_rotation,
        softcap=softcap,
        mask=None if mask is None else mask.unsqueeze(1),
    )
    rows = torch.cat([case.key, case.value], -1)
    if mask is None:
        rows = rows.masked_fill(~full_mask.unsqueeze(-1).to(device), torch.nan)
        ranges = [[s.kv_start for s in sequences], [s.kv_end for s in sequences]]
        keys = DecodeKeys(*torch.tensor(ranges, dtype=torch.int32, device=device))
    else:
        keys = DecodeKeys.from_mask(full_mask.to(device))
    table = None
    if page_size:
        rows, table = paged(rows, page_size, torch.Generator().manual_seed(3))
    key, value = rows.split([layout.qk_width, layout.v_width], dim=-1)
    got, lse = decode_attention(
        case.query[:, 0] if layout.domain == "none" else case.query[:, :, 0],
        key,
        value,
        parts,
        keys,
        case.heads_per_kv,
        case.scaling,
        query_basis=case.query_basis,
        key_rotation=case.key_rotation,
        block_table=table,
        softcap=softcap,
        schedule=schedule,
        programs=programs,
    )
    limit = FLOAT32_ERROR
    if case.key.dtype != torch.float32:
        limit = allowed_error(case, expected, full_mask[:, None, None]) if softcap is None else 0.02
    assert relative_error(got, expected[:, 0]) <= limit
    assert_lse(lse, expected_lse[:, :, 0], 20 * limit)


BEFORE, BEHIND = 3, 2
"""Tokens of no sequence before and behind packed queries."""


def run_prefill(
    query: Tensor, key: Tensor, value: Tensor, layout: LayerLayout, keys: PrefillKeys, *args: Any, packed: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`prefill_attention`, with the queries of all sequences packed behind each other where asked for, between tokens
    of no sequence, which must be left alone.
    """
    if not packed:
        return prefill_attention(query, key, value, layout, keys, *args, **options)
    assert keys.mask is None
    rows, there = query.transpose(1, 2) if layout.domain == "pre" else query, keys.end > 0
    lengths = there.sum(1)

    def pack(x: Tensor, fill: float) -> Tensor:
        edges = [x.new_full((n, *x.shape[2:]), fill) for n in (BEFORE, BEHIND)]
        return torch.cat([edges[0], x[there], edges[1]])

    starts = BEFORE + torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    packed_keys = PrefillKeys(
        pack(keys.first, 0),
        pack(keys.end, 0),
        query_start_loc=starts,
        longest=query.shape[-2] + 1,
        longest_kv=int(keys.end.max()) + 5,
    )
    queries = pack(rows, torch.nan)
    width = layout.group_size * args[0] * layout.v_width
    output = torch.full((len(queries), width), 7.0, dtype=query.dtype, device=query.device)
    got, got_lse = prefill_attention(queries, key, value, layout, packed_keys, *args, output=output, **options)
    assert got is output
    assert bool((output[:BEFORE] == 7.0).all())
    assert bool((output[len(queries) - BEHIND :] == 7.0).all())
    found = output.new_zeros(*there.shape, width)
    found[there] = output[BEFORE : len(queries) - BEHIND]
    lse = got_lse.new_full((*there.shape, len(got_lse)), -torch.inf)
    lse[there] = got_lse[:, BEFORE : len(queries) - BEHIND].T
    return found, lse.transpose(1, 2)


def check_prefill(
    case: RaggedCase,
    sequences: list[Sequence],
    *,
    page_size: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    rebuilt: bool | None = None,
    programs: int | None = None,
) -> None:
    """Prefill the queries of each sequence, which are packed where keys are in pages; keys outside of a sequence's
    range are poisoned with NaN.

    `mask` [batch_size, seq_len, kv_len] takes keys away from what is causal, and goes to the kernel as a mask.
    """
    layout, device = case.layout, case.key.device
    kv_len = case.key.shape[1]
    seq_len = case.query.shape[1] if layout.domain == "none" else case.query.shape[2]
    expected, expected_lse = ragged_attention(
        case.query,
        case.key,
        case.value,
        layout,
        case.heads_per_kv,
        case.scaling,
        sequences,
        case.query_basis,
        case.key_rotation,
        window=window,
        softcap=softcap,
        mask=mask,
    )
    fields = [[s.query_len for s in sequences], [s.kv_start for s in sequences], [s.kv_end for s in sequences]]
    keys = PrefillKeys.causal(*torch.tensor(fields, device=device), seq_len, window)
    index = torch.arange(kv_len, device=device)
    full_mask = (index >= keys.first[..., None]) & (index < keys.end[..., None])
    if mask is not None:
        full_mask &= mask.to(device)
        keys = PrefillKeys.from_mask(full_mask)
    rows = torch.cat([case.key, case.value], -1)
    inside = (index >= torch.tensor(fields[1], device=device)[:, None]) & (
        index < torch.tensor(fields[2], device=device)[:, None]
    )
    rows = rows.masked_fill(~inside.unsqueeze(-1), torch.nan)
    table = None
    if page_size:
        rows, table = paged(rows, page_size, torch.Generator().manual_seed(3))
    key, value = rows.split([layout.qk_width, layout.v_width], dim=-1)
    got, lse = run_prefill(
        case.query,
        key,
        value,
        layout,
        keys,
        case.heads_per_kv,
        case.scaling,
        packed=page_size > 0,
        query_basis=case.query_basis,
        key_rotation=case.key_rotation,
        block_table=table,
        softcap=softcap,
        rebuilt=rebuilt,
        programs=programs,
    )
    limit = FLOAT32_ERROR
    if case.key.dtype != torch.float32:
        limit = allowed_error(case, expected, full_mask[:, None]) if softcap is None else 0.02
    assert relative_error(got, expected) <= limit
    assert_lse(lse, expected_lse, 20 * limit)
