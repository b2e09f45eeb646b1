# mypy: disable-error-code="no-untyped-def"
"""Finish a step of a layer with exact tokens: what `join` does elsewhere, and attention to the exact tokens, in one.

A program serves some query heads of one KV head, and all new tokens of a sequence. It attends to the exact keys,
joins the partial results of the slices by their log-sum-exp, weighs both, and takes the latents of values to the head's
dimensions: heads = share of codes x (latents x output_basis^T + value_constant) + share of exact tokens x their values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import NEG_INF, UNSEEN
from .join import slices_of_group

INTEGERS = [
    "batch_size", "groups", "programs", "slots", "output_stride", "query_stride", "head_stride", "basis_stride",
    "key_batch", "key_head", "key_slot", "value_batch", "value_head", "value_slot", "index_stride", "page_stride",
    "mask_stride",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = [
    "output", "begin", "until", "query_start", "first", "end", "codes_first", "codes_until", "mask", "holes", "index",
    "block_table",
]  # fmt: skip
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def finish_kernel(
    query, partial, partial_lse, output_basis, value_constant, key, value, index, output, table, begin, until,
    query_start, first, end, codes_first, codes_until, mask, holes, block_table,
    batch_size, groups, programs, slots, output_stride, query_stride, head_stride, basis_stride, key_batch, key_head,
    key_slot, value_batch, value_head, value_slot, index_stride, page_stride, mask_stride, scale, softcap,
    CODED: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, SHARE: tl.constexpr, TOKENS: tl.constexpr,
    APART: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ALIGN: tl.constexpr,
    BASIS_ALIGN: tl.constexpr, VALUE_COLUMNS: tl.constexpr, VALUE_FULL: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, SLICES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    CONSTANT: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Finish SHARE query heads of a sequence. Grid: query heads over SHARE, sequences.

    Tensors:
        query: [tokens, num_heads, head_dim], rotated. key, value, index, block_table: as in `exact_slots.ExactSlots`.
        partial, partial_lse, table: of `decode_kernel`; entry 7 of a group in `table` is the first column of its values
            in the basis, in units of BASIS_ALIGN.
        output_basis: [HEADS * head_dim, sum of value widths]. value_constant: [num_kv_heads, head_dim], float32.
        output: [tokens, num_heads * head_dim].
        begin, until: ranges of the rows of codes. first, end, mask, holes: of all keys, see `KeyRanges`.
        codes_first: [batch_size], codes_until: [tokens], see `exact_slots.ExactSlots`.
    Constants:
        APART: query rows (SHARE times TOKENS), rounded up to a power of two. ROWS: columns of the products, a multiple
            of that: the rows are repeated.
        DIM: head_dim, padded. ALIGN: unit of the strides of exact keys and values.
        COLUMNS: of values' latents, whose partial results are joined at once, SLICES at a time.
        KEYS: exact keys of a tile. PAGE: tokens of a page of them; 0 without pages.
    """
    DTYPE: tl.constexpr = output.dtype.element_ty
    OPERANDS: tl.constexpr = CODED if CODED else 1
    GROUP_ROWS: tl.constexpr = HEADS * PER_HEAD
    head = tl.program_id(0) * SHARE
    sequence = tl.program_id(1)
    kv_head = head // PER_HEAD
    group = kv_head // HEADS
    # Query rows: new tokens, then query heads.
    row = tl.arange(0, ROWS) % APART
    token = sequence + tl.zeros_like(row)
    live = row < SHARE * TOKENS
    if TOKENS > 1:
        token = tl.load(query_start + sequence) + row // SHARE
        live &= token < tl.load(query_start + sequence + 1)
    dim = tl.arange(0, DIM)
    inside = (dim < HEAD_DIM)[:, None] & live[None, :]
    at = query + token.to(tl.int64)[None, :] * query_stride + (head + row % SHARE)[None, :] * head_stride + dim[:, None]
    q = tl.load(at, mask=inside, other=0.0)
    row_first = tl.load(first + token, mask=live, other=0)
    row_end = tl.load(end + token, mask=live, other=0)
    codes_end = tl.load(codes_until + token, mask=live, other=0)
    codes_begin = tl.load(codes_first + sequence)
    if MASK:
        open_ = tl.load(holes + token, mask=live, other=0) != 0

    # Exact keys: those that a row attends to and does not read as codes. State of the online softmax as in decoding.
    largest = tl.full((ROWS,), UNSEEN, tl.float32)
    exact_weight = tl.zeros((ROWS,), tl.float32)
    attended = tl.zeros((DIM, ROWS), tl.float32)
    keys = key + kv_head.to(tl.int64) * key_head * ALIGN
    values = value + kv_head.to(tl.int64) * value_head * ALIGN
    for start in tl.range(0, slots, KEYS, num_stages=STAGES):
        slot = start + tl.arange(0, KEYS)
        place = tl.load(index + sequence.to(tl.int64) * index_stride + slot, mask=slot < slots, other=-1)
        held = (place >= 0)[:, None] & (dim < HEAD_DIM)[None, :]
        page = tl.zeros_like(slot).to(tl.int64) + sequence
        if PAGE:
            table_row = block_table + sequence.to(tl.int64) * page_stride
            page = tl.load(table_row + place // PAGE, mask=place >= 0, other=0).to(tl.int64)
            slot = place % PAGE
        k = tl.load(keys + (page * key_batch + slot * key_slot)[:, None] * ALIGN + dim[None, :], mask=held, other=0.0)
        at_values = values + (page * value_batch + slot * value_slot)[:, None] * ALIGN
        v = tl.load(at_values + dim[None, :], mask=held, other=0.0)
        logits = tl.dot(k, q, tl.zeros((KEYS, ROWS), tl.float32), input_precision=PRECISION) * scale
        if SOFTCAP:
            logits = softcap - 2.0 * softcap / (tl.exp2(logits * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        at_row = place[:, None]
        visible = (at_row >= row_first[None, :]) & (at_row < row_end[None, :]) & (at_row >= 0)
        visible &= (at_row < codes_begin) | (at_row >= codes_end[None, :])
        if MASK:
            bits = mask + token.to(tl.int64)[None, :] * mask_stride + at_row
            visible &= tl.load(bits, mask=visible & open_[None, :], other=1) != 0
        logits = tl.where(visible, logits, NEG_INF)
        now_largest = tl.maximum(largest, tl.max(logits, 0))
        weights = tl.exp2(logits - now_largest[None, :]).to(DTYPE)
        shrink = tl.exp2(largest - now_largest)
        exact_weight = exact_weight * shrink + tl.sum(weights.to(tl.float32), 0)
        attended = tl.dot(tl.trans(v), weights, attended * shrink[None, :], input_precision=PRECISION)
        largest = now_largest

    # Weights of both: largest logit, and sums relative to it.
    low, high = slices_of_group(begin, until, batch_size, groups, programs, sequence, group, STEP)
    results = (sequence * groups + group).to(tl.int64) * (TOKENS * GROUP_ROWS) + head % GROUP_ROWS
    of_row = results + row // SHARE * GROUP_ROWS + row % SHARE
    whole = largest
    codes_weight = tl.zeros((ROWS,), tl.float32)
    for start in range(low, high + 1, SLICES):
        program = start + tl.arange(0, SLICES)
        there = (program <= high)[:, None] & live[None, :]
        at_lse = partial_lse + program[:, None] * (TOKENS * GROUP_ROWS) + of_row[None, :]
        log_sums = tl.load(at_lse, mask=there, other=NEG_INF)
        now_largest = tl.maximum(whole, tl.max(log_sums, 0))
        codes_weight = codes_weight * tl.exp2(whole - now_largest)
        codes_weight += tl.sum(tl.exp2(log_sums - now_largest[None, :]), 0)
        whole = now_largest
    exact_share = exact_weight * tl.exp2(largest - whole)
    total = exact_share + codes_weight
    total = tl.where(total > 0, total, 1.0)  # 0 for a row that attends to nothing
    result = attended * (exact_share / tl.where(exact_weight > 0, exact_weight, 1.0) / total)[None, :]
    if CONSTANT:
        constant = tl.load(value_constant + kv_head * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        result += constant[:, None] * (codes_weight / total)[None, :]

    # Latents of values, COLUMNS at a time: the slices' joined results, times the basis. Operands lie one after another,
    # each with its first `width` columns.
    width = VALUE_COLUMNS if VALUE_FULL else tl.load(table + group * 8 + 2)
    query_row = tl.arange(0, APART)
    row_results = results + query_row // SHARE * GROUP_ROWS + query_row % SHARE
    row_live = query_row < SHARE * TOKENS
    if TOKENS > 1:
        row_live &= tl.load(query_start + sequence) + query_row // SHARE < tl.load(query_start + sequence + 1)
    whole = tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == query_row[None, :], whole[:, None], 0.0), 0)
    total = tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == query_row[None, :], total[:, None], 0.0), 0)
    of_head = output_basis + (kv_head % HEADS * HEAD_DIM + dim).to(tl.int64)[:, None] * basis_stride * BASIS_ALIGN
    of_head += tl.load(table + group * 8 + 7) * BASIS_ALIGN
    for start in range(0, OPERANDS * width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        some = column < OPERANDS * width
        source = column if VALUE_FULL else column // width * VALUE_COLUMNS + column % width
        latents = tl.zeros((APART, COLUMNS), tl.float32)
        for slice_0 in range(low, high + 1, SLICES):
            program = slice_0 + tl.arange(0, SLICES)
            at_result = program[:, None] * (TOKENS * GROUP_ROWS) + row_results[None, :]
            there = (program <= high)[:, None] & row_live[None, :]
            log_sums = tl.load(partial_lse + at_result, mask=there, other=NEG_INF)
            weights = tl.exp2(log_sums - whole[None, :]) / total[None, :]
            at_latents = at_result[:, :, None] * (OPERANDS * VALUE_COLUMNS) + source[None, None, :]
            slice_latents = tl.load(partial + at_latents, mask=there[:, :, None] & some[None, None, :], other=0.0)
            latents += tl.sum(slice_latents * weights[:, :, None], 0)
        basis = tl.load(of_head + column[None, :], mask=(dim < HEAD_DIM)[:, None] & some[None, :], other=0.0)
        repeated = tl.trans(latents.to(DTYPE))
        if ROWS > APART:
            repeated = repeated[:, None, :].broadcast_to((COLUMNS, ROWS // APART, APART)).reshape((COLUMNS, ROWS))
        result = tl.dot(basis, repeated, result, input_precision=PRECISION)
    out = output + token.to(tl.int64)[None, :] * output_stride
    out += (head + row % SHARE)[None, :] * HEAD_DIM + dim[:, None]
    tl.store(out, result.to(DTYPE), mask=inside & (tl.arange(0, ROWS) < APART)[None, :])
