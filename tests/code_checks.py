"""Checks of the kernels over rows of codes against the float64 attention, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from coded import CodedCase
from kernel_checks import FLOAT32_ERROR, allowed_error, assert_lse, relative_error, run_prefill
from ragged import paged
from torch import Tensor

from rotor.format.kernel_config import LayerKernels
from rotor.kernels.decode.launch import decode_attention
from rotor.kernels.key_ranges import DecodeKeys, PrefillKeys
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.truth import Sequence, ragged_attention


def poisoned_rows(case: CodedCase, inside: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Key and value rows with 255 in every byte of the keys that are not `inside` [batch_size, kv_len], and the block
    table where they are spread over pages. 255 in all bytes is no number in columns of 16 bits.
    """
    rows = torch.cat([case.key, case.value], -1).masked_fill(~inside.unsqueeze(-1).to(case.key.device), 255)
    table = None
    if page_size:
        rows, table = paged(rows, page_size, torch.Generator().manual_seed(3))
    key, value = rows.split([case.key.shape[-1], case.value.shape[-1]], dim=-1)
    return key, value, table


def limit_of(case: CodedCase, expected: Tensor, mask: Tensor, softcap: float | None) -> float:
    if case.query.dtype == torch.float32:
        return FLOAT32_ERROR
    return allowed_error(case.floats, expected, mask) if softcap is None else 0.02


def check_coded_decode(
    case: CodedCase,
    sequences: list[Sequence],
    *,
    schedule: str = "stream",
    programs: int | None = None,
    page_size: int = 0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    kernels: LayerKernels | None = None,
) -> None:
    """As `kernel_checks.check_decode`."""
    floats, device = case.floats, case.key.device
    parts = layer_parts(
        case.layout, floats.heads_per_kv, floats.head_dim, kernels, element_bytes=case.query.element_size()
    )
    full_mask = torch.zeros(case.key.shape[:2], dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        full_mask[b, sequence.kv_start : sequence.kv_end] = True
    inside = full_mask
    if mask is not None:
        full_mask = full_mask & mask
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
        keys = DecodeKeys.from_mask(full_mask.to(device))
    key, value, table = poisoned_rows(case, inside, page_size)
    value = case.parameters().value_rows(key, value)
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
    limit = limit_of(case, expected, full_mask[:, None, None], softcap)
    assert relative_error(got, expected[:, 0]) <= limit
    assert_lse(lse, expected_lse[:, :, 0], 20 * limit)


def check_coded_prefill(
    case: CodedCase,
    sequences: list[Sequence],
    *,
    page_size: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    rebuilt: bool | None = None,
    programs: int | None = None,
) -> None:
    """As `kernel_checks.check_prefill`."""
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
    fields = [[s.query_len for s in sequences], [s.kv_start for s in sequences], [s.kv_end for s in sequences]]
    keys = PrefillKeys.causal(*torch.tensor(fields, device=device), seq_len, window)
    index = torch.arange(case.key.shape[1], device=device)
    full_mask = (index >= keys.first[..., None]) & (index < keys.end[..., None])
    if mask is not None:
        full_mask &= mask.to(device)
        keys = PrefillKeys.from_mask(full_mask)
    inside = (index >= torch.tensor(fields[1], device=device)[:, None]) & (
        index < torch.tensor(fields[2], device=device)[:, None]
    )
    key, value, table = poisoned_rows(case, inside, page_size)
    value = case.parameters().value_rows(key, value)
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
    limit = limit_of(case, expected, full_mask[:, None], softcap)
    assert relative_error(got, expected) <= limit
    assert_lse(lse, expected_lse, 20 * limit)
