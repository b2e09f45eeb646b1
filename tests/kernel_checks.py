"""Checks of the kernels against the float64 attention, shared by the interpreter's tests and those on a GPU.

Of rows of numbers and of rows of codes alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from typing import Any
from unittest.mock import patch

import pytest
import torch
from coded import CodedCase
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


def limit_of(case: RaggedCase | CodedCase, exact: Tensor, mask: Tensor, softcap: float | None) -> float:
    """Of the relative error; `mask` is [batch_size, 1, seq_len, kv_len]."""
    if case.query.dtype == torch.float32:
        return FLOAT32_ERROR
    return allowed_error(case.floats, exact, mask) if softcap is None else 0.02


def poisoned_rows(case: RaggedCase | CodedCase, inside: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Key and value rows with NaN in the keys that are not `inside` [batch_size, kv_len], of codes 255 in every byte,
    which is no number in columns of 16 bits; and the block table where they are spread over pages.
    """
    rows = torch.cat([case.key, case.value], -1)
    rows = rows.masked_fill(~inside.unsqueeze(-1).to(rows.device), 255 if rows.dtype == torch.uint8 else torch.nan)
    table = None
    if page_size:
        rows, table = paged(rows, page_size, torch.Generator().manual_seed(3))
    key, value = rows.split([case.key.shape[-1], case.value.shape[-1]], dim=-1)
    return key, case.parameters().value_rows(key, value), table


def check_decode(
    case: RaggedCase | CodedCase,
    sequences: list[Sequence],
    *,
    schedule: str = "stream",
    programs: int | None = None,
    page_size: int = 0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    kernels: LayerKernels | None = None,
) -> None:
    """Decode one query of each sequence; keys outside of a sequence's range are poisoned.

    `mask` [batch_size, kv_len] goes to the kernel in place of the sequences' ranges, which it must lie in. `kernels`
    are the layer's launches, by default by rule.
    """
    floats, device = case.floats, case.key.device
    parts = layer_parts(
        case.layout, floats.heads_per_kv, floats.head_dim, kernels, element_bytes=case.query.element_size()
    )
    inside = torch.zeros(case.key.shape[:2], dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        inside[b, sequence.kv_start : sequence.kv_end] = True
    attended = inside if mask is None else inside & mask
    expected, expected_lse = ragged_attention(
        floats.query,
        floats.key,
        floats.value,
        floats.layout,
        floats.heads_per_kv,
        floats.scaling,
        sequences,
        floats.query_basis,
        floats.key_rotation,
        softcap=softcap,
        mask=None if mask is None else mask.unsqueeze(1),
    )
    if mask is None:
        ranges = [[s.kv_start for s in sequences], [s.kv_end for s in sequences]]
        keys = DecodeKeys(*torch.tensor(ranges, dtype=torch.int32, device=device))
    else:
        keys = DecodeKeys.from_mask(attended.to(device))
    key, value, table = poisoned_rows(case, inside, page_size)
    got, lse = decode_attention(
        case.query[:, 0] if case.layout.domain == "none" else case.query[:, :, 0],
        key,
        value,
        parts,
        keys,
        floats.heads_per_kv,
        floats.scaling,
        query_basis=case.query_basis,
        key_rotation=floats.key_rotation,
        constant_key=case.constant_key,
        block_table=table,
        softcap=softcap,
        schedule=schedule,
        programs=programs,
    )
    limit = limit_of(case, expected, attended[:, None, None], softcap)
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
    case: RaggedCase | CodedCase,
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
    range are poisoned.

    `mask` [batch_size, seq_len, kv_len] takes keys away from what is causal, and goes to the kernel as a mask.
    """
    floats, device = case.floats, case.key.device
    seq_len = case.query.shape[1] if case.layout.domain == "none" else case.query.shape[2]
    expected, expected_lse = ragged_attention(
        floats.query,
        floats.key,
        floats.value,
        floats.layout,
        floats.heads_per_kv,
        floats.scaling,
        sequences,
        floats.query_basis,
        floats.key_rotation,
        window=window,
        softcap=softcap,
        mask=mask,
    )
    lengths, starts, ends = torch.tensor(
        [[s.query_len for s in sequences], [s.kv_start for s in sequences], [s.kv_end for s in sequences]],
        device=device,
    )
    keys = PrefillKeys.causal(lengths, starts, ends, seq_len, window)
    index = torch.arange(case.key.shape[1], device=device)
    attended = (index >= keys.first[..., None]) & (index < keys.end[..., None])
    if mask is not None:
        attended &= mask.to(device)
        keys = PrefillKeys.from_mask(attended)
    inside = (index >= starts[:, None]) & (index < ends[:, None])
    key, value, table = poisoned_rows(case, inside, page_size)
    got, lse = run_prefill(
        case.query,
        key,
        value,
        case.layout,
        keys,
        floats.heads_per_kv,
        floats.scaling,
        packed=page_size > 0,
        query_basis=case.query_basis,
        key_rotation=floats.key_rotation,
        constant_key=case.constant_key,
        block_table=table,
        softcap=softcap,
        rebuilt=rebuilt,
        programs=programs,
    )
    limit = limit_of(case, expected, attended[:, None], softcap)
    assert relative_error(got, expected) <= limit
    assert_lse(lse, expected_lse, 20 * limit)
