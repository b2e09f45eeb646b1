# mypy: disable-error-code="no-untyped-def"
"""Append new tokens of a layer to the cache: rotate, project, quantise and pack keys and values, and rotate queries.

In a layer with exact tokens keys are also rotated as attention takes them, and stored in their slots with the values of
heads, which are projected here.

All of it is one launch. A program makes some words of a group's row for some tokens. A table says which digit is in
each of the four nibbles of a word. The columns of the basis are gathered by this table, so that the columns of the
product are the nibbles, lane by lane, followed by the lower crumbs of split lanes. A channel with several digits is
computed once for each, which costs little beside reading the basis. The row of a joint group of codes has a scale, by
all of its latents: there programs leave latents in memory, and the last one of a group codes them (`quantise`).

Lower bound of the time: bytes of the basis, keys and rows over memory bandwidth; in decoding the basis is nearly all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.checkpoint.rows import SCALE_LARGEST, SCALE_MIDDLE, SCALE_STEPS, CodedRow, RowScale

from .absorb import absorb_head
from .absorb_launch import Absorbing, JoinedPrograms
from .arrivals import counters, last_of, prepare_counters
from .exact_slots import SlotsToFill
from .launch import device_table, launch, padded, precision
from .parameters import as_loaded, row_dtype
from .quantise import EMPTY, GROUP_FIELDS, code_group, coding_plan, digits_of, lanes_of, packed
from .rotary import Rotation

KEYS, VALUES, QUERIES, EXACT_KEYS = 0, 1, 2, 3
"""Kinds of jobs: make rows of a group's keys, make rows of its values, rotate a query head, rotate (and store) a KV
head."""

FIELDS = 7
"""Numbers that describe a job: its kind; first head; first entry of the digit table (or first column); words of a
group; first word (or number) in the row; words (or numbers) with content; words (or numbers) to write. Of joint groups
of codes: kind, first head, first column, programs of the group, its number, columns, columns."""

COLUMNS = 64
"""Digits, or numbers of a row, that a program makes."""

NONE, WHOLE, BLOCK = 0, 1, 2
"""Rotation of stored keys: none, by the position, or by the position in the block."""

LATENT_BYTES = 64 << 20
"""Most bytes of latents that programs of a launch leave to others; more tokens are appended in parts."""

ABSORBS = (
    "GROUPS", "CODED", "SCALED", "PLANES", "ROTARY", "REST", "BLOCK", "HEADS", "PER_HEAD", "COLUMNS", "PART", "CHUNK",
    "COUNT", "STAGES", "HELD", "ASM",
)  # fmt: skip
"""Constants of absorbing, see `DecodeLayer.absorb_constants`."""

INTEGERS = [
    "first_token", "tokens", "seq_len", "table_rows", "index_batch", "block", "page", "query_batch",
    "query_position", "query_head", "key_batch", "key_position", "key_head", "value_batch", "value_position",
    "value_head", "basis_stride", "value_basis_stride", "table_stride", "key_page", "key_row", "value_page",
    "value_row", "num_heads", "rotated_heads", "groups", "rank", "offset", "begin", "slots_batch",
    "slots_head", "slots_slot", "job_count", "blocks", "shared", "max_blocks", "starts_blocks",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all lengths."""

ADDRESSES = [
    "query",
    "key",
    "value",
    "key_basis",
    "key_shift",
    "value_basis",
    "value_shift",
    "cos",
    "sin",
    "index",
    "slots",
    "key_rows",
    "value_rows",
    "offsets",
    "begins",
    "codes_begin",
    "codes_until",
]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which a view may not be. Another kernel
would be compiled for it, perhaps while a CUDA graph is captured. Strides are not known to be multiples either, so
nothing is lost."""


@triton.jit
def rotation_of(cos, sin, row, valid, table_stride, block, MODE: tl.constexpr, HALF: tl.constexpr,
                HALF_PADDED: tl.constexpr):  # fmt: skip
    """Load cos and sin of some tokens, [tokens, HALF_PADDED] float32, from their rows of the table.

    MODE: NONE, WHOLE or BLOCK. With BLOCK the attention factor, which row 0 holds, is divided out, because queries are
    multiplied by it.
    """
    plane = tl.arange(0, HALF_PADDED)
    if MODE == 2:
        row = row % block  # stored keys are rotated within their block alone
    inside = valid[:, None] & (plane < HALF)[None, :]
    start = row.to(tl.int64)[:, None] * table_stride + plane[None, :]
    own_cos = tl.load(cos + start, mask=inside, other=1.0).to(tl.float32)
    own_sin = tl.load(sin + start, mask=inside, other=0.0).to(tl.float32)
    if MODE == 2:
        factor = tl.load(cos + plane, mask=plane < HALF, other=1.0).to(tl.float32)
        own_cos = own_cos / factor[None, :]
        own_sin = own_sin / factor[None, :]
    return own_cos, own_sin


@triton.jit
def projected(
    key, basis, shift, cos, sin, row, valid, source, head_stride, basis_stride, table_stride, block, column, some,
    SIZE: tl.constexpr, MODE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr,
    REST_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rotate a group's keys as they are stored, and multiply them by columns of its basis: [ROWS, COLUMNS] float32.

    REST: dimensions that RoPE does not rotate. SIZE: KV heads of the group.
    """
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    dim = 2 * HALF + REST
    if HALF > 0:
        plane = tl.arange(0, HALF_PADDED)
        there = valid[:, None] & (plane < HALF)[None, :]
        read = (plane < HALF)[:, None] & some[None, :]
        if MODE > 0:
            own_cos, own_sin = rotation_of(cos, sin, row, valid, table_stride, block, MODE, HALF, HALF_PADDED)
        # Head by head: both halves of the rotary planes, rotated, times their rows of the basis. A group's heads stand
        # below each other in the basis, so their products add up in one latent.
        for head in range(SIZE):
            start = key + (source + head * head_stride)[:, None] + plane[None, :]
            first = tl.load(start, mask=there, other=0.0).to(tl.float32)
            second = tl.load(start + HALF, mask=there, other=0.0).to(tl.float32)
            if MODE > 0:
                rotated = first * own_cos - second * own_sin
                second = second * own_cos + first * own_sin
                first = rotated
            tile = basis + (head * dim + plane[:, None]) * basis_stride + column[None, :]
            one = tl.load(tile, mask=read, other=0.0)
            two = tl.load(tile + HALF * basis_stride, mask=read, other=0.0)
            result = tl.dot(first.to(one.dtype), one, result, input_precision=PRECISION)
            result = tl.dot(second.to(two.dtype), two, result, input_precision=PRECISION)
    if REST > 0:
        place = tl.arange(0, REST_PADDED)
        there = valid[:, None] & (place < REST)[None, :]
        read = (place < REST)[:, None] & some[None, :]
        for head in range(SIZE):
            basis_rest = tl.load(
                key + (source + head * head_stride)[:, None] + 2 * HALF + place[None, :], mask=there, other=0.0
            )
            tile = basis + (head * dim + 2 * HALF + place[:, None]) * basis_stride + column[None, :]
            numbers = tl.load(tile, mask=read, other=0.0)
            result = tl.dot(basis_rest.to(numbers.dtype), numbers, result, input_precision=PRECISION)
    if SHIFT:
        result += tl.load(shift + column, mask=some, other=0.0)[None, :]
    return result


@triton.jit
def of_values(
    value, basis, shift, source, head, head_stride, basis_stride, valid, column, some, BASIS: tl.constexpr,
    SHIFT: tl.constexpr, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Latents of values, [ROWS, COLUMNS] float32: given by the projection, or computed from the heads of a group."""
    if BASIS:
        return projected(
            value, basis, shift, value, value, column, valid, source + head * head_stride, head_stride, basis_stride, 0,
            1, column, some, SIZE, 0, 0, 16, HEAD_DIM, HEAD_PADDED, ROWS, COLUMNS, SHIFT, PRECISION,
        )  # fmt: skip
    else:
        whole = valid[:, None] & some[None, :]
        return tl.load(value + source[:, None] + column[None, :], mask=whole, other=0.0).to(tl.float32)


@triton.jit
def rotate_head(
    query, query_out, cos, sin, row, valid, source, target, table_stride, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """Rotate a query head of some tokens by their positions."""
    plane = tl.arange(0, HALF_PADDED)
    there = valid[:, None] & (plane < HALF)[None, :]
    own_cos, own_sin = rotation_of(cos, sin, row, valid, table_stride, 1, 1, HALF, HALF_PADDED)
    start = query + source[:, None] + plane[None, :]
    first = tl.load(start, mask=there, other=0.0).to(tl.float32)
    second = tl.load(start + HALF, mask=there, other=0.0).to(tl.float32)
    kind = query_out.dtype.element_ty
    out = query_out + target[:, None] + plane[None, :]
    tl.store(out, (first * own_cos - second * own_sin).to(kind), mask=there)
    tl.store(out + HALF, (second * own_cos + first * own_sin).to(kind), mask=there)
    if REST > 0:
        place = tl.arange(0, REST_PADDED)
        there = valid[:, None] & (place < REST)[None, :]
        rest = tl.load(query + source[:, None] + 2 * HALF + place[None, :], mask=there, other=0.0)
        tl.store(query_out + target[:, None] + 2 * HALF + place[None, :], rest, mask=there)


@triton.jit
def store_head(
    key, value, exact_keys, exact_values, cos, sin, row, valid, from_key, from_value, place, slots_slot, offset, begin,
    table_stride, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    FIRST: tl.constexpr, NEWEST: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """Store a KV head of some tokens exactly, the key rotated: in their slots, and in those of first tokens.

    offset, begin: of each token, see `exact_slots.SlotsToFill`. place: of slot 0 of its sequence and head.
    """
    dim = tl.arange(0, HEAD_PADDED)
    # Every token goes to its slot of the ring; the first of a sequence also to slots that no newer one takes.
    for first in tl.static_range(2 if FIRST else 1):
        slot = offset - begin if first else FIRST + offset % NEWEST
        there = valid & (slot >= 0) & (slot < FIRST) if first else valid
        to = place + slot.to(tl.int64) * slots_slot
        rotate_head(
            key, exact_keys, cos, sin, row, there, from_key, to, table_stride, HALF, HALF_PADDED, REST, REST_PADDED
        )
        inside = there[:, None] & (dim < HEAD_DIM)[None, :]
        copied = tl.load(value + from_value[:, None] + dim[None, :], mask=inside, other=0.0)
        tl.store(exact_values + to[:, None] + dim[None, :], copied, mask=inside)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def append_kernel(
    query, key, value, key_basis, key_shift, value_basis, value_shift, cos, sin, index, slots, query_out, key_rows,
    value_rows, places, jobs, latents_out, arrived, code_shift, code_length, code_halves, code_places, code_groups,
    exact_keys, exact_values, offsets, begins, query_basis, constants, starts, absorbed, block_constant, codes_begin,
    codes_until,
    first_token, tokens, seq_len, table_rows, index_batch, block, page, query_batch, query_position, query_head,
    key_batch, key_position, key_head, value_batch, value_position, value_head, basis_stride, value_basis_stride,
    table_stride, key_page, key_row, value_page, value_row, num_heads, rotated_heads, groups,
    rank, offset, begin, slots_batch, slots_head, slots_slot, job_count, blocks, shared, max_blocks, starts_blocks,
    scale,
    SIZE: tl.constexpr, MODE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr,
    REST_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, CODED: tl.constexpr,
    FOLDED: tl.constexpr, PART: tl.constexpr, SHIFT: tl.constexpr, VALUE_BASIS: tl.constexpr,
    VALUE_SHIFT: tl.constexpr, QUERY: tl.constexpr, EXACT: tl.constexpr, INDEX: tl.constexpr, SLOTS: tl.constexpr,
    STORE: tl.constexpr, FIRST: tl.constexpr, NEWEST: tl.constexpr, OFFSETS: tl.constexpr, BEGINS: tl.constexpr,
    LATENTS: tl.constexpr, MIDDLE: tl.constexpr, LARGEST: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FIELDS: tl.constexpr, GROUP_FIELDS: tl.constexpr, PRECISION: tl.constexpr,
    LANES: tl.constexpr, ABSORB: tl.constexpr, ABSORB_GROUPS: tl.constexpr, ABSORB_CODED: tl.constexpr,
    ABSORB_SCALED: tl.constexpr, ABSORB_PLANES: tl.constexpr, ABSORB_ROTARY: tl.constexpr, ABSORB_REST: tl.constexpr,
    ABSORB_BLOCK: tl.constexpr, ABSORB_HEADS: tl.constexpr, ABSORB_PER_HEAD: tl.constexpr,
    ABSORB_COLUMNS: tl.constexpr, ABSORB_PART: tl.constexpr, ABSORB_CHUNK: tl.constexpr, ABSORB_COUNT: tl.constexpr,
    ABSORB_STAGES: tl.constexpr, ABSORB_HELD: tl.constexpr, ABSORB_ASM: tl.constexpr,
):  # fmt: skip
    """Do one job for ROWS of the tokens first_token ... tokens - 1; see `append`.

    Grid: `blocks` of ROWS tokens for each of job_count jobs; with ABSORB behind these `shared` programs for each query
    head of each sequence, which do what those of `absorb_kernel` do, for a query that is rotated here.

    MODE: rotation of keys (NONE, WHOLE, BLOCK). FOLDED: keys are given as latents. PART: `value` is the values'
    part of joint latents and is added to that of the keys. SHIFT: the basis has a shift. VALUE_BASIS: values are
    given as heads, and have a basis; VALUE_SHIFT: which has a shift. QUERY: there are queries to rotate; EXACT: and
    keys, which are written behind them. INDEX, SLOTS: `index` or `slots` is given. STORE: store keys and values of
    heads exactly, by offset and begin, which with OFFSETS and BEGINS are on the device; FIRST, NEWEST: slots.
    LANES: lanes of the digit table, 4 or 8. LATENTS: joint groups of codes, whose latents are left in
    `latents_out`, [tokens - first_token, rank] float32, and coded by the last program of a group, by the tables of
    `quantise.CodingPlan`; arrived: counters, see `arrivals`, for each block of tokens and group.
    query_basis ... codes_until: of `absorb_head`; ABSORB_...: its constants.
    """
    # ROWS tokens, and a job of the table: words of a row, a query head to rotate, or a KV head to store exactly. One
    # launch does all kinds: in a small step most of the time is that of launches.
    program = tl.program_id(0)
    if ABSORB:  # noqa: SIM102
        if program >= blocks * job_count:
            query_program = program - blocks * job_count
            query_now, part = query_program // shared, query_program % shared
            of_sequence, own_head = query_now // num_heads, query_now % num_heads
            own_row = of_sequence % table_rows
            if INDEX:
                own_row = tl.load(index + of_sequence * index_batch).to(tl.int32)
            of_position = own_row.to(tl.int64) * table_stride
            absorb_head(
                query + of_sequence.to(tl.int64) * query_batch + own_head * query_head, cos + of_position,
                sin + of_position, query_basis, constants, starts, absorbed, block_constant,
                tl.load(codes_begin + of_sequence), tl.load(codes_until + of_sequence), own_head, of_sequence, 0, part,
                shared, max_blocks, starts_blocks, scale, True, ABSORB_GROUPS, ABSORB_CODED, ABSORB_SCALED,
                ABSORB_PLANES, ABSORB_ROTARY, HEAD_DIM, ABSORB_REST, ABSORB_BLOCK, ABSORB_HEADS, ABSORB_PER_HEAD, 1,
                ABSORB_COLUMNS, ABSORB_PART, ABSORB_CHUNK, ABSORB_COUNT, ABSORB_STAGES, ABSORB_HELD,
                PRECISION, ABSORB_ASM,
            )  # fmt: skip
            return
    token_block = program % blocks
    token = first_token + token_block * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    job = jobs + program // blocks * FIELDS
    kind, head, start = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    sequence, position = (token // seq_len).to(tl.int64), (token % seq_len).to(tl.int64)
    # Row of the table of cosines and sines of each token.
    row = token % table_rows
    if INDEX:
        row = tl.load(index + sequence * index_batch + position, mask=valid, other=0)
    if QUERY:  # noqa: SIM102
        if kind == 2:
            rotate_head(
                query, query_out, cos, sin, row, valid,
                sequence * query_batch + position * query_position + head * query_head,
                (token.to(tl.int64) * rotated_heads + head) * (2 * HALF + REST), table_stride, HALF, HALF_PADDED, REST,
                REST_PADDED,
            )  # fmt: skip
            return
    if EXACT or STORE:  # noqa: SIM102
        if kind == 3:
            if EXACT:
                rotate_head(
                    key, query_out, cos, sin, row, valid,
                    sequence * key_batch + position * key_position + head * key_head,
                    (token.to(tl.int64) * rotated_heads + num_heads + head) * (2 * HALF + REST), table_stride, HALF,
                    HALF_PADDED, REST, REST_PADDED,
                )  # fmt: skip
            if STORE:
                # In a CUDA graph the index of the token lies on the device, and changes from launch to launch.
                index_now = tl.zeros((ROWS,), tl.int64) + offset
                if OFFSETS:
                    index_now = tl.zeros((ROWS,), tl.int64) + tl.load(offsets)
                index_0 = tl.zeros((ROWS,), tl.int64) + begin
                if BEGINS:
                    index_0 = tl.load(begins + sequence, mask=valid, other=0).to(tl.int64)
                store_head(
                    key, value, exact_keys, exact_values, cos, sin, row, valid,
                    sequence * key_batch + position * key_position + head * key_head,
                    sequence * value_batch + position * value_position + head * value_head,
                    sequence * slots_batch + head * slots_head, slots_slot, index_now, index_0, table_stride, HALF,
                    HALF_PADDED, REST, REST_PADDED, FIRST, NEWEST, HEAD_DIM, HEAD_PADDED,
                )  # fmt: skip
            return
    words, first_word = tl.load(job + 3), tl.load(job + 4)
    held, written = tl.load(job + 5), tl.load(job + 6)
    # Columns of the basis that this program needs, by the digit table if rows are codes.
    if CODED:
        lane, word = tl.arange(0, COLUMNS) // (COLUMNS // LANES), tl.arange(0, COLUMNS) % (COLUMNS // LANES)
        place = tl.load(places + start + lane * words + word, mask=word < held, other=-1)
        column, some = place >> 10, place >= 0
    else:
        column = start + tl.arange(0, COLUMNS)
        some = tl.arange(0, COLUMNS) < held
        place = column
    whole = valid[:, None] & some[None, :]
    from_key = sequence * key_batch + position * key_position
    from_value = sequence * value_batch + position * value_position
    # Latents: given by the projection, or computed from keys.
    if kind == 0:
        if FOLDED:
            latents = tl.load(key + from_key[:, None] + column[None, :], mask=whole, other=0.0).to(tl.float32)
        else:
            latents = projected(
                key, key_basis, key_shift, cos, sin, row, valid, from_key + head * key_head, key_head, basis_stride,
                table_stride, block, column, some, SIZE, MODE, HALF, HALF_PADDED, REST, REST_PADDED, ROWS,
                COLUMNS, SHIFT, PRECISION,
            )  # fmt: skip
            if PART:
                latents += of_values(
                    value, value_basis, value_shift, from_value, head, value_head, value_basis_stride, valid,
                    column, some, VALUE_BASIS, False, SIZE, HEAD_DIM, HEAD_PADDED, ROWS, COLUMNS, PRECISION,
                )  # fmt: skip
    else:
        latents = of_values(
            value, value_basis, value_shift, from_value, head, value_head, value_basis_stride, valid, column, some,
            VALUE_BASIS, VALUE_SHIFT, SIZE, HEAD_DIM, HEAD_PADDED, ROWS, COLUMNS, PRECISION,
        )  # fmt: skip
    # Write to the token's row, or to its slot in pages; a negative slot is not written.
    slot = token.to(tl.int64)
    stored = valid
    if SLOTS:
        slot = tl.load(slots + token, mask=valid, other=-1).to(tl.int64)
        stored = valid & (slot >= 0)
        slot = tl.maximum(slot, 0)
    of_key = key_rows + slot // page * key_page + slot % page * key_row
    if LATENTS:
        last = True
        # Latents that a projection put out lie in memory already; others are left there first.
        if FOLDED:
            own = key + from_key
        else:
            own = latents_out + (token - first_token).to(tl.int64) * rank
            tl.store(own[:, None] + column[None, :], latents, mask=whole)
            last = last_of(arrived + token_block * groups + first_word, words)
        if last:
            # The scale of a row is chosen by all latents of the group, so whoever stores the last of them codes.
            code_group(
                own, code_shift, code_length, code_halves, of_key, code_places,
                code_groups + first_word * GROUP_FIELDS, valid, stored, ROWS, COLUMNS, LANES, MIDDLE, LARGEST,
                STEPS,
            )  # fmt: skip
    else:
        if CODED:
            out = first_word + tl.arange(0, COLUMNS // LANES)
            full = tl.arange(0, COLUMNS // LANES) < held
            result = tl.where(full[None, :], packed(latents, place, token, ROWS, COLUMNS, LANES), 0)
            mask = stored[:, None] & (tl.arange(0, COLUMNS // LANES) < written)[None, :]
        else:
            out = first_word + tl.arange(0, COLUMNS)
            result = latents
            mask = stored[:, None] & some[None, :]
        if kind == 0:
            tl.store(of_key[:, None] + out[None, :], result.to(key_rows.dtype.element_ty), mask=mask)
        else:
            of_value = value_rows + slot // page * value_page + slot % page * value_row
            tl.store(of_value[:, None] + out[None, :], result.to(value_rows.dtype.element_ty), mask=mask)


class Appended(NamedTuple):
    """Results of `append`.

    query: rotated, [batch_size, num_heads, seq_len, head_dim], a view; None if none was given.
    key, value: rows, [batch_size, 1, seq_len, bytes] uint8, or of numbers [batch_size, 1, seq_len, width]; those of
        `out` if it was given.
    exact_key, exact_value: in a layer with exact tokens keys after RoPE and values, [batch_size, num_kv_heads, seq_len,
        head_dim], views.
    rotated: queries and, in a layer with exact tokens, keys after RoPE, [batch_size, seq_len, heads, head_dim], of
        which those are views; None if nothing was rotated.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor
    exact_key: Tensor | None = None
    exact_value: Tensor | None = None
    rotated: Tensor | None = None


def append(
    key: Tensor,
    value: Tensor | None,
    layout: LayerLayout,
    shape: AttentionShape,
    *,
    query: Tensor | None = None,
    key_basis: Tensor | None = None,
    key_shift: Tensor | None = None,
    value_basis: Tensor | None = None,
    value_shift: Tensor | None = None,
    rotation: Rotation | None = None,
    index: Tensor | None = None,
    scale: RowScale | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    fill: SlotsToFill | None = None,
    absorb: Absorbing | None = None,
) -> Appended:
    """Make the rows of new tokens, rotate their queries, and absorb these, in one launch.

    Args:
        key: if the key basis is folded (`layout.folds_keys`), latents [batch_size, seq_len, key_rank], the output of
            k_proj; else keys after their norm and before RoPE, [batch_size, seq_len, num_kv_heads, head_dim], heads in
            the order of the layout. The innermost stride is 1.
        value: [batch_size, seq_len, value_rank], the output of v_proj: latents of values, or their part of joint
            latents; None or empty if there is none (joint and folded). With value_basis heads, [batch_size, seq_len,
            num_kv_heads, head_dim], in the order of the layout.
        query: queries before RoPE, [batch_size, seq_len, num_heads, head_dim]; None for a model without RoPE, or an
            engine that rotates them.
        key_basis: [group_size * head_dim, key_rank]; None if folded.
        key_shift: [key_rank] float32; None if folded or without codes.
        value_basis: [group_size * head_dim, value_rank], in a layer with exact tokens; value_shift: [value_rank]
            float32, of codes of values alone. Joint latents are the sum of what both bases give.
        rotation: cos and sin, [positions, rotary_dim] each, float32 or the model's dtype, with RoPE's attention factor;
            None in a model without RoPE, or if keys are given as they are stored.
        index: integers, [seq_len] or [batch_size, seq_len], the row of `rotation` for each token. Row 0 is the
            beginning of a block of positions, so row i is position i mod rope_block of its block. By default token t
            of sequence b has row b * seq_len + t, or t in a table of seq_len rows.
        scale: how the latents of joint groups are scaled and coded; None of others.
        out: rows to write into, in place of new ones: [batch_size, 1, seq_len, bytes] each, or with `slots` pages
            [num_pages, page_size, bytes]; rows of numbers are in the model's dtype. A joint layer ignores the second.
        slots: [batch_size * seq_len], integers, page * page_size + index in the page for each token; negative for none.
        fill: in a layer with exact tokens whose keys are rotated here, or without RoPE: keep the new token of each
            sequence there.
        absorb: absorb the queries, of one new token of each sequence, for a decode step.
    """
    batch_size, seq_len = key.shape[:2]
    tokens = batch_size * seq_len
    if value is not None and not value.shape[-1]:
        value = None
    exact = layout.exact is not None
    as_it_is = out is None and not layout.coded and not exact
    rows = _new_rows(key, value, layout, shape, as_it_is) if out is None else out
    sides = [as_loaded(side, layout) for side in (rows[0], layout.values_from(*rows))]
    rotated_keys = shape.num_kv_heads if exact and rotation is not None else 0
    rotated = None
    if query is not None:
        rotated = query.new_empty(batch_size, seq_len, shape.num_heads + rotated_keys, shape.head_dim)
    at = 1 if slots is None else 0  # rows are [batch_size, 1, seq_len, .], pages [num_pages, page_size, .]
    page = seq_len if slots is None else sides[0].shape[1]
    row_strides = [stride for side in sides for stride in (side.stride(0), side.stride(1 + at))]
    bases = key_basis, key_shift, value_basis, value_shift
    most = tokens
    if layout.scaled and not layout.folds_keys(shape) and absorb is None:  # a step has few tokens
        most = max(1, LATENT_BYTES // (4 * layout.key_rank))
    call = _Call(key, value, layout, shape, query, rotated, rotated_keys, bases, rotation, index, scale, fill, absorb)
    for start in range(0, tokens, most):
        call.launch(range(start, min(start + most, tokens)), sides, page, row_strides, slots, as_it_is)
    if rotated is not None:
        query, keys = rotated.transpose(1, 2).split([shape.num_heads, rotated_keys], dim=1)
        key = keys.transpose(1, 2) if rotated_keys else key
    if not exact or value is None:
        return Appended(query, *rows, rotated=rotated)
    return Appended(query, *rows, key.transpose(1, 2), value.transpose(1, 2), rotated)


@dataclass(frozen=True)
class _Call:
    """Values that the launches of one call of `append` share.

    rotated: gets the queries, and behind them rotated_keys keys. bases: of keys and their shift, of values and theirs.
    """

    key: Tensor
    value: Tensor | None
    layout: LayerLayout
    shape: AttentionShape
    query: Tensor | None
    rotated: Tensor | None
    rotated_keys: int
    bases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    rotation: Rotation | None
    index: Tensor | None
    scale: RowScale | None
    fill: SlotsToFill | None
    absorb: Absorbing | None

    def launch(
        self,
        tokens: range,
        sides: Sequence[Tensor],
        page: int,
        row_strides: Sequence[int],
        slots: Tensor | None = None,
        as_it_is: bool = False,
    ) -> None:
        """Launch the kernel for some tokens, counted through the sequences.

        Args:
            sides: rows of keys and of values to write into. row_strides: of both, from one page (or sequence) of `page`
                tokens to the next, and from one token to the next.
            as_it_is: outputs of projections are rows already.
        """
        key, value, layout, shape, query = self.key, self.value, self.layout, self.shape, self.query
        rotation, index, exact = self.rotation, self.index, self.layout.exact is not None
        stored = self.fill is not None
        plan = tables_of(
            layout, shape, key.dtype, query is not None, as_it_is, rotation is not None, stored, key.device
        )
        if not tokens or not len(plan.jobs):
            return
        cos, sin = (key, key) if rotation is None else rotation
        if index is not None and index.dim() == 2 and index.stride(1) != 1:
            index = index.contiguous()
        source = key if value is None else value
        asked = query if query is not None else key.unsqueeze(2)
        key_basis, key_shift, value_basis, value_shift = self.bases
        rows_each, warps = (16, 4) if len(tokens) <= 512 else (64, 8)  # of a program
        batch_size, seq_len = key.shape[:2]
        blocks, groups = triton.cdiv(len(tokens), rows_each), len(layout.groups)
        latents, arrived, coding = key, plan.jobs, (key,) * 5
        if layout.scaled:
            assert self.scale is not None
            tables = coding_plan(layout, key.device)
            coding = self.scale.shift, self.scale.length, tables.halves, tables.places, tables.groups
            if not layout.folds_keys(shape):
                latents = torch.empty(len(tokens), layout.key_rank, dtype=torch.float32, device=key.device)
                arrived = counters(blocks * groups, key.device)
        exact_sides, slot_strides, first, newest, offset, begin = (key, key), (0, 0, 0), 0, 1, 0, 0
        if self.fill is not None:
            keys, values, first, newest, offset, begin = self.fill
            assert seq_len == 1
            assert keys.stride() == values.stride()
            exact_sides, slot_strides = (keys, values), keys.stride()[:3]
        on_device = isinstance(offset, Tensor), isinstance(begin, Tensor)
        absorbing = JoinedPrograms(0, (key,) * 7, 1, 0, 0, 0.0, dict.fromkeys(ABSORBS, 0))
        if self.absorb is not None:
            assert len(tokens) * shape.num_heads == self.absorb.queries
            absorbing = self.absorb.joined(warps)
        launch(
            append_kernel, (blocks * len(plan.jobs) + absorbing.programs,), asked, key, source,
            *(key if each is None else each for each in self.bases), cos, sin,
            plan.jobs if index is None else index, plan.jobs if slots is None else slots,
            key if self.rotated is None else self.rotated, *sides, plan.places, plan.jobs, latents, arrived, *coding,
            *exact_sides, offset if on_device[0] else plan.jobs, begin if on_device[1] else plan.jobs,
            *absorbing.tensors, tokens.start, tokens.stop, seq_len,
            batch_size * seq_len if rotation is None else len(cos),
            index.stride(0) if index is not None and index.dim() == 2 and len(index) > 1 else 0,
            layout.rope_block or 1, page, *asked.stride()[:3], key.stride(0), key.stride(1),
            key.stride(2) if key.dim() == 4 else 0, source.stride(0), source.stride(1),
            source.stride(2) if exact else 0, 0 if key_basis is None else key_basis.stride(0),
            0 if value_basis is None else value_basis.stride(0), cos.stride(0), *row_strides, shape.num_heads,
            shape.num_heads + self.rotated_keys, groups, layout.key_rank,
            0 if on_device[0] else offset, 0 if on_device[1] else begin, *slot_strides, len(plan.jobs), blocks,
            absorbing.shared, absorbing.max_blocks, absorbing.starts_blocks, absorbing.scale, **plan.constants,
            **{f"ABSORB_{name}": absorbing.constants[name] for name in ABSORBS},
            PART=layout.joint and value is not None, SHIFT=key_shift is not None, VALUE_BASIS=exact,
            VALUE_SHIFT=value_shift is not None, QUERY=query is not None, EXACT=self.rotated_keys > 0,
            INDEX=index is not None, SLOTS=slots is not None, STORE=stored, FIRST=first, NEWEST=newest,
            OFFSETS=on_device[0], BEGINS=on_device[1], ROWS=rows_each, ABSORB=self.absorb is not None, num_warps=warps,
        )  # fmt: skip


def _new_rows(
    key: Tensor, value: Tensor | None, layout: LayerLayout, shape: AttentionShape, as_it_is: bool
) -> tuple[Tensor, Tensor]:
    """Allocate rows; with `as_it_is` outputs of projections that are rows of numbers already are used."""
    size = key.element_size()
    unit, dtype = layout.element_bytes(size), row_dtype(layout, key.dtype)
    widths = (row_bytes // unit for row_bytes in layout.row_bytes(size))
    rows = [key.new_empty(key.shape[0], 1, key.shape[1], width, dtype=dtype) for width in widths]
    if as_it_is and layout.folds_keys(shape):
        rows[0] = key.unsqueeze(1)
    if as_it_is and value is not None and not layout.joint:
        rows[1] = value.unsqueeze(1)
    return rows[0], rows[1]


class Plan(NamedTuple):
    """Tables of a layer on a device.

    places: the digit table, see `digits_of`, for the layer's key rows and then its value rows.
    jobs: [jobs, FIELDS].
    constants: constexpr arguments of the kernel.
    """

    places: Tensor
    jobs: Tensor
    constants: dict[str, int | bool | str]


@lru_cache(maxsize=4096)
def tables_of(
    layout: LayerLayout,
    shape: AttentionShape,
    dtype: torch.dtype,
    query: bool,
    as_it_is: bool,
    rotated: bool,
    stored: bool,
    device: torch.device,
) -> Plan:
    """Make the tables of a layer.

    Args:
        query: there are queries to rotate.
        as_it_is: outputs of projections that are rows already are not copied.
        rotated: keys are rotated by the kernel. stored: and kept in slots of exact tokens.
    """
    folded = layout.folds_keys(shape)
    lanes = lanes_of(layout)
    places: list[int] = []
    jobs: list[list[int]] = []
    size, unit = dtype.itemsize, layout.word_bytes(dtype.itemsize)
    sides = [keys for keys in (True, False) if not (as_it_is and (folded or not keys)) and (keys or not layout.joint)]
    for keys in sides:
        column = 0
        for number, (group, offsets) in enumerate(zip(layout.groups, layout.byte_offsets(size), strict=True)):
            latent, dest = (group.key, offsets[0] // unit) if keys else (group.values, offsets[1] // unit)
            kind, head = (KEYS if keys else VALUES), number * layout.group_size
            if layout.scaled:
                parts = range(0, latent.rank, latent.rank if folded else COLUMNS)
                jobs += [[kind, head, column + done, len(parts), number, *[latent.rank - done] * 2] for done in parts]
            elif isinstance(latent, CodedRow):
                first, words = len(places), latent.words
                places += [entry for lane in digits_of(latent, column, lanes) for entry in lane]
                following = layout.byte_offsets(size)[number + 1 :]
                end = following[0][not keys] if following else layout.read_bytes(size)[not keys]
                written = end // unit - dest
                for word in range(0, written, COLUMNS // lanes):
                    jobs.append([kind, head, first + word, words, dest + word, words - word, written - word])
            else:
                for done in range(0, latent.rank, COLUMNS):
                    left = latent.rank - done
                    jobs.append([kind, head, column + done, 0, dest + done, left, left])
            column += latent.rank
    if query:
        jobs += [[QUERIES, head] + [0] * (FIELDS - 2) for head in range(shape.num_heads)]
    if stored or (query and layout.exact is not None and rotated):
        jobs += [[EXACT_KEYS, head] + [0] * (FIELDS - 2) for head in range(shape.num_kv_heads)]
    half, rest = shape.rotary_planes, shape.head_dim - shape.rotary_dim
    mode = WHOLE if layout.rope_block is None else NONE if layout.pre_rope else BLOCK
    constants = {
        "SIZE": layout.group_size, "MODE": mode if half and rotated else NONE, "HALF": half,
        "HALF_PADDED": padded(half or 1), "REST": rest, "REST_PADDED": padded(rest or 1),
        "HEAD_DIM": shape.head_dim, "HEAD_PADDED": padded(shape.head_dim),
        "CODED": layout.coded and not layout.scaled, "LATENTS": layout.scaled, "FOLDED": folded,
        "MIDDLE": SCALE_MIDDLE, "LARGEST": SCALE_LARGEST, "STEPS": SCALE_STEPS, "COLUMNS": COLUMNS, "FIELDS": FIELDS,
        "GROUP_FIELDS": GROUP_FIELDS, "PRECISION": precision(dtype), "LANES": lanes,
    }  # fmt: skip
    return Plan(device_table(places or [EMPTY], device), device_table(jobs, device), constants)


def prepare(layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
    """Put a layer's tables on the device, before a CUDA graph is captured."""
    if layout.scaled:
        coding_plan(layout, device)
        prepare_counters(device)
    for query in (False, True):
        for as_it_is in (False, not layout.coded and layout.exact is None):
            for rotated in (False, True):
                for stored in {False, layout.exact is not None}:
                    tables_of(layout, shape, dtype, query, as_it_is, rotated, stored, device)
