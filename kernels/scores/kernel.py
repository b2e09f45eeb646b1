# mypy: disable-error-code="no-untyped-def"
"""Column sums of attention: one product of queries and keys, given the log-sum-exp of each row; and that, where
attention did not find it.

Floor: the bytes of queries and keys once, and one product (two with the log-sum-exp) at the rate of the tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.format.layout import LayerLayout

from ..ahead import Variant
from ..gpu import precision
from ..launch import launch
from .column_sums import ClassProducts

QUERIES, KEYS, WIDTH = 64, 64, 64
"""Of one tile; a product goes over the width in pieces."""

INTEGERS = ["units", "seq_len", "kv_len", "mask_batch", "mask_unit", "mask_head", "mask_query", "mask_key"]
"""Not specialised on their values, as in the decode kernel."""


@triton.jit
def _logits(
    query, key, bias, mask, rows, columns, seq_len, kv_len, scaling, softcap, inverse_temperature, mask_query,
    mask_key, CAUSAL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of a tile [QUERIES, KEYS], -inf where nothing is attended to; pointers are to the head's own, whose rows
    have ROW numbers."""
    products = tl.zeros((QUERIES, KEYS), tl.float32)
    row_ok, column_ok = rows < seq_len, columns < kv_len
    for first in tl.static_range(0, ROW, WIDTH):
        place = first + tl.arange(0, WIDTH)
        inside = place < ROW
        q = tl.load(query + rows[:, None] * ROW + place[None, :], mask=row_ok[:, None] & inside[None, :], other=0.0)
        k = tl.load(key + columns[:, None] * ROW + place[None, :], mask=column_ok[:, None] & inside[None, :], other=0.0)
        products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)
    logits = products * scaling
    if SOFTCAP:
        # tanh by exponentials of what is not positive, which cannot overflow.
        shrunk = tl.exp(-2.0 * tl.abs(logits / softcap))
        size = softcap * (1.0 - shrunk) / (1.0 + shrunk)
        logits = tl.where(logits < 0, -size, size)
    if BIAS:
        logits += tl.load(bias + columns, mask=column_ok, other=0.0)[None, :]
    logits *= inverse_temperature
    seen = row_ok[:, None] & column_ok[None, :]
    if CAUSAL:
        seen &= columns[None, :] <= rows[:, None]
    if MASK:
        at = mask + rows.to(tl.int64)[:, None] * mask_query + columns.to(tl.int64)[None, :] * mask_key
        seen &= tl.load(at, mask=seen, other=0) != 0
    return tl.where(seen, logits, float("-inf"))


@triton.jit(do_not_specialize=INTEGERS)
def log_sums_kernel(
    query, key, bias, mask, log_sums, units, seq_len, kv_len, scaling, softcap, inverse_temperature, mask_batch,
    mask_unit, mask_head, mask_query, mask_key, HEADS: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ROW: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each row; grid (blocks of QUERIES, units * HEADS, batch_size)."""
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    sequence, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64) % HEADS
    unit = tl.program_id(1).to(tl.int64) // HEADS
    of_unit = sequence * units + unit
    of_head = of_unit * HEADS + head
    mask_base = mask + sequence * mask_batch + unit * mask_unit + head * mask_head
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, (tl.program_id(0) + 1) * QUERIES)
    for start in range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        logits = _logits(
            query + of_head * seq_len * ROW, key + of_unit * kv_len * ROW, bias + of_unit * kv_len, mask_base, rows,
            columns, seq_len, kv_len, scaling, softcap, inverse_temperature, mask_query, mask_key, CAUSAL, MASK,
            BIAS, SOFTCAP, QUERIES, KEYS, ROW, WIDTH, PRECISION,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(logits, 1))
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - reference) + tl.sum(tl.exp(logits - reference[:, None]), 1)
        largest = larger
    found = tl.where(total > 0, largest + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(log_sums + of_head * seq_len + rows, found, mask=rows < seq_len)


@triton.jit(do_not_specialize=INTEGERS)
def column_sums_kernel(
    query, key, bias, mask, log_sums, sums, units, seq_len, kv_len, scaling, softcap, inverse_temperature,
    mask_batch, mask_unit, mask_head, mask_query, mask_key, HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROW: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of columns over the rows of all heads of a unit; grid (blocks of KEYS, units, batch_size).

    log_sums: +inf where a row is not counted, or attends to nothing.
    """
    columns = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    sequence, unit = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    of_unit = sequence * units + unit
    total = tl.zeros((KEYS,), tl.float32)
    first = 0
    if CAUSAL:
        first = tl.program_id(0) * KEYS // QUERIES * QUERIES  # queries before see nothing of these keys
    for head in range(0, HEADS):
        of_head = of_unit * HEADS + head
        mask_base = mask + sequence * mask_batch + unit * mask_unit + head * mask_head
        for start in range(first, seq_len, QUERIES):
            rows = start + tl.arange(0, QUERIES)
            logits = _logits(
                query + of_head * seq_len * ROW, key + of_unit * kv_len * ROW, bias + of_unit * kv_len, mask_base,
                rows, columns, seq_len, kv_len, scaling, softcap, inverse_temperature, mask_query, mask_key,
                CAUSAL, MASK, BIAS, SOFTCAP, QUERIES, KEYS, ROW, WIDTH, PRECISION,
            )  # fmt: skip
            own = tl.load(log_sums + of_head * seq_len + rows, mask=rows < seq_len, other=float("inf"))
            total += tl.sum(tl.exp(logits - own[:, None]), 0)
    tl.store(sums + of_unit * kv_len + columns, total, mask=columns < kv_len)


def sums_of_columns(products: ClassProducts, counted: Tensor) -> Tensor:
    """As `column_sums.sums_in_blocks`, by kernels, in float32; masks are bool."""
    queries, keys = products.queries.contiguous(), products.keys.contiguous()
    batch_size, units, heads, seq_len, _ = queries.shape
    kv_len, device = keys.shape[2], queries.device
    bias = queries if products.bias is None else products.bias.float().contiguous()
    mask, strides = queries, [0] * 5
    if products.mask is not None:
        expanded = products.mask.expand(batch_size, units, heads, seq_len, kv_len)
        mask, strides = expanded.view(torch.uint8), list(expanded.stride())
    constants = launch_constants(products, queries.element_size())
    numbers = (units, seq_len, kv_len, products.scaling, products.softcap or 1.0, 1 / products.temperature)
    log_sums = products.log_sums
    if log_sums is None:
        log_sums = torch.empty(batch_size, units, heads, seq_len, dtype=torch.float32, device=device)
        grid = triton.cdiv(seq_len, QUERIES), units * heads, batch_size
        launch(log_sums_kernel, grid, queries, keys, bias, mask, log_sums, *numbers, *strides, **constants)
    left_out = (log_sums == -torch.inf) | ~counted[:, None, None]
    log_sums = log_sums.float().masked_fill(left_out, torch.inf).contiguous()
    sums = torch.empty(batch_size, units, kv_len, dtype=torch.float32, device=device)
    grid = triton.cdiv(kv_len, KEYS), units, batch_size
    launch(column_sums_kernel, grid, queries, keys, bias, mask, log_sums, sums, *numbers, *strides, **constants)
    return sums


def launch_constants(products: ClassProducts, element_bytes: int) -> dict[str, Any]:
    """What the kernels are compiled for."""
    heads, row = products.queries.shape[2], products.queries.shape[-1]
    flags = products.mask is not None, products.bias is not None, products.softcap is not None
    return _constants(heads, row, products.causal, *flags, element_bytes)


def _constants(
    heads: int, row: int, causal: bool, mask: bool, bias: bool, softcap: bool, element_bytes: int
) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "CAUSAL": causal,
        "MASK": mask,
        "BIAS": bias,
        "SOFTCAP": softcap,
        "QUERIES": QUERIES,
        "KEYS": KEYS,
        "ROW": row,
        "WIDTH": WIDTH,
        "PRECISION": precision(element_bytes),
        "num_warps": 8,
    }


def score_variants(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    softened: bool,
    mask: bool = False,
    softcap: bool = False,
) -> list[Variant]:
    """What `sums_of_columns` compiles for the prompts of a layer whose cache policy adds up what keys draw.

    Args:
        softened: whether the policy adds a number for each key to the logits: their log-sum-exp is then found anew;
            otherwise attention's own is given.
        mask: whether the layer has one; without one queries are causal.
    """
    single = torch.float32
    pointers = {**dict.fromkeys(("query", "key"), dtype), **dict.fromkeys(("log_sums", "sums"), single)}
    pointers |= {"bias": single if softened else dtype, "mask": torch.uint8 if mask else dtype}
    reals = "scaling", "softcap", "inverse_temperature"
    kernels = {"log sums": log_sums_kernel} if softened else {}
    variants = []
    for cls in layout.classes():
        pre = layout.domain == "pre"
        heads, row = heads_per_kv * (1 if pre else layout.group_size), head_dim if pre else cls.qk_rank
        constants = _constants(heads, row, not mask, mask, softened, softcap, dtype.itemsize)
        options = {"num_warps": constants.pop("num_warps")}
        for name, kernel in {**kernels, "column sums": column_sums_kernel}.items():
            of_kernel = {argument: of for argument, of in pointers.items() if argument in kernel.arg_names}
            label = f"{name} {heads} heads of {row}"
            variants.append(Variant(label, kernel, of_kernel, dict(constants), reals, options))
    return variants
