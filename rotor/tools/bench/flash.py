# mypy: disable-error-code="no-untyped-def"
"""Flash-decoding in Triton over the caches of `baselines`, of sequences of any lengths.

A program takes some keys of a KV head of a sequence with all query heads that share them; a second kernel joins these
chunks by their log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.launch import device_guard, sm_count
from .baselines import Baseline, Call

KEYS = 64
PROGRAMS_PER_SM = 8
"""Programs that chunks are made for."""


@triton.jit(do_not_specialize=["tokens", "chunk", "chunks"])
def flash_kernel(
    query, key, value, key_scale, value_scale, partial, log_sum, starts, lengths, tokens, chunk, chunks, scale,
    value_factor,
    FOUR_BITS: tl.constexpr, PER_HEAD: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid: chunks, KV heads, sequences.

    query: [sequences, heads, 2 * HALF]. key, value: [kv_heads, tokens, 2 * HALF], or bytes [kv_heads, tokens, HALF]
    with scales [kv_heads, tokens, 4]: scale and offset of the low nibbles, then of the high ones. starts, lengths: of a
    sequence among tokens. partial: [sequences, kv_heads, chunks, ROWS, 2 * HALF]. value_factor: of all values.
    """
    kind: tl.constexpr = query.dtype.element_ty
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(lengths + sequence)
    first = tl.program_id(0) * chunk
    if first < length:
        last = tl.minimum(length, first + chunk)
        row = tl.arange(0, ROWS)
        half = tl.arange(0, HALF)
        at = tl.arange(0, KEYS)
        of_query = (sequence * tl.num_programs(1) + head) * PER_HEAD + row
        own = query + of_query[:, None] * (2 * HALF) + half[None, :]
        q0 = tl.load(own, mask=(row < PER_HEAD)[:, None], other=0.0)
        q1 = tl.load(own + HALF, mask=(row < PER_HEAD)[:, None], other=0.0)
        sum0 = tl.sum(q0.to(tl.float32), 1)
        sum1 = tl.sum(q1.to(tl.float32), 1)
        begin = head.to(tl.int64) * tokens + tl.load(starts + sequence)
        largest = tl.full((ROWS,), -1e30, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        out0 = tl.zeros((ROWS, HALF), tl.float32)
        out1 = tl.zeros((ROWS, HALF), tl.float32)
        for place in range(first, last, KEYS):
            there = place + at < last
            token = begin + place + at
            if FOUR_BITS:
                words = tl.load(key + token[:, None] * HALF + half[None, :], mask=there[:, None], other=0)
                k0 = (words & 15).to(kind)
                k1 = (words >> 4).to(kind)
                scales = key_scale + token * 4
                logits = tl.dot(q0, k0.T) * tl.load(scales, mask=there, other=0.0).to(tl.float32)[None, :]
                logits += tl.dot(q1, k1.T) * tl.load(scales + 2, mask=there, other=0.0).to(tl.float32)[None, :]
                logits += sum0[:, None] * tl.load(scales + 1, mask=there, other=0.0).to(tl.float32)[None, :]
                logits += sum1[:, None] * tl.load(scales + 3, mask=there, other=0.0).to(tl.float32)[None, :]
            else:
                rows = key + token[:, None] * (2 * HALF) + half[None, :]
                logits = tl.dot(q0, tl.load(rows, mask=there[:, None], other=0.0).to(kind).T)
                logits = tl.dot(q1, tl.load(rows + HALF, mask=there[:, None], other=0.0).to(kind).T, logits)
            logits = tl.where(there[None, :], logits * scale, -1e30)
            now = tl.maximum(largest, tl.max(logits, 1))
            shrink = tl.exp2(largest - now)
            weights = tl.exp2(logits - now[:, None])
            weight = weight * shrink + tl.sum(weights, 1)
            out0 *= shrink[:, None]
            out1 *= shrink[:, None]
            if FOUR_BITS:
                words = tl.load(value + token[:, None] * HALF + half[None, :], mask=there[:, None], other=0)
                scales = value_scale + token * 4
                of0 = weights * tl.load(scales, mask=there, other=0.0).to(tl.float32)[None, :]
                of1 = weights * tl.load(scales + 2, mask=there, other=0.0).to(tl.float32)[None, :]
                off0 = tl.sum(weights * tl.load(scales + 1, mask=there, other=0.0).to(tl.float32)[None, :], 1)
                off1 = tl.sum(weights * tl.load(scales + 3, mask=there, other=0.0).to(tl.float32)[None, :], 1)
                out0 = tl.dot(of0.to(kind), (words & 15).to(kind), out0) + off0[:, None]
                out1 = tl.dot(of1.to(kind), (words >> 4).to(kind), out1) + off1[:, None]
            else:
                rows = value + token[:, None] * (2 * HALF) + half[None, :]
                out0 = tl.dot(weights.to(kind), tl.load(rows, mask=there[:, None], other=0.0).to(kind), out0)
                out1 = tl.dot(weights.to(kind), tl.load(rows + HALF, mask=there[:, None], other=0.0).to(kind), out1)
            largest = now
        slot = ((sequence * tl.num_programs(1) + head) * chunks + tl.program_id(0)) * ROWS + row
        to = partial + slot[:, None].to(tl.int64) * (2 * HALF) + half[None, :]
        weight_of_value = value_factor / weight
        tl.store(to, out0 * weight_of_value[:, None])
        tl.store(to + HALF, out1 * weight_of_value[:, None])
        tl.store(log_sum + slot, largest + tl.log2(weight))


@triton.jit(do_not_specialize=["chunk", "chunks"])
def chunks_kernel(
    partial, log_sum, output, lengths, chunk, chunks,
    PER_HEAD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid: query heads, sequences. output: [sequences, heads, WIDTH]."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    count = (tl.load(lengths + sequence) + chunk - 1) // chunk
    of_head = (sequence * (tl.num_programs(0) // PER_HEAD) + head // PER_HEAD) * chunks
    column = tl.arange(0, WIDTH)
    largest = -1e30
    weight = 0.0
    joined = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, count, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        slot = (of_head + index) * ROWS + head % PER_HEAD
        sums = tl.load(log_sum + slot, mask=index < count, other=-1e30)
        now = tl.maximum(largest, tl.max(sums, 0))
        weights = tl.exp2(sums - now)
        rows = partial + slot[:, None].to(tl.int64) * WIDTH + column[None, :]
        shrink = tl.exp2(largest - now)
        values = tl.load(rows, mask=(index < count)[:, None], other=0.0)
        joined = joined * shrink + tl.sum(values * weights[:, None], 0)
        weight = weight * shrink + tl.sum(weights, 0)
        largest = now
    to = output + (sequence * tl.num_programs(0) + head) * WIDTH + column
    tl.store(to, (joined / weight).to(output.dtype.element_ty))


def flash_decoding(problem: Baseline) -> Call:
    """[sequences, heads, head_dim], by Triton."""
    p, device = problem, problem.query.device
    (sequences, heads, head_dim), kv_heads = p.query.shape, len(p.key)
    per_head, longest = heads // kv_heads, max(p.lengths)
    wanted = PROGRAMS_PER_SM * sm_count(device)
    chunk = max(KEYS, triton.cdiv(triton.cdiv(sum(p.lengths) * kv_heads, wanted), KEYS) * KEYS)
    chunks = triton.cdiv(longest, chunk)
    rows = max(16, triton.next_power_of_2(per_head))
    lengths = torch.tensor(p.lengths, dtype=torch.int32, device=device)
    starts = (lengths.cumsum(0) - lengths).int()
    partial = torch.empty(sequences, kv_heads, chunks, rows, head_dim, device=device)
    log_sum = torch.empty(sequences, kv_heads, chunks, rows, device=device)
    four_bits = p.key.dtype == torch.uint8
    scales, factors = (p.key, p.value), (1.0, 1.0)
    if p.key_scale is not None and p.value_scale is not None:
        if four_bits:
            scales = p.key_scale, p.value_scale
        else:
            factors = float(p.key_scale), float(p.value_scale)
    log2 = 1.4426950408889634 * head_dim**-0.5 * factors[0]

    def call() -> Tensor:
        output = torch.empty_like(p.query)
        with device_guard(device):
            flash_kernel[chunks, kv_heads, sequences](
                p.query, p.key, p.value, *scales, partial, log_sum, starts, lengths, p.key.shape[1], chunk, chunks,
                log2, factors[1], FOUR_BITS=four_bits, PER_HEAD=per_head, ROWS=rows, HALF=head_dim // 2, KEYS=KEYS,
                num_warps=4, num_stages=3,
            )  # fmt: skip
            chunks_kernel[heads, sequences](
                partial, log_sum, output, lengths, chunk, chunks, PER_HEAD=per_head, ROWS=rows, WIDTH=head_dim,
                AT_ONCE=16, num_warps=4,
            )  # fmt: skip
        return output

    return call
