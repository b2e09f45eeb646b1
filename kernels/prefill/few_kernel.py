# mypy: disable-error-code="no-untyped-def, assignment"
"""Few new tokens against a long cache: all groups of a layer in one launch, their keys split over programs.

Floor: bytes of the compressed keys and values that are attended / memory bandwidth, as in decoding. Widths and places
of each group come from the table of parts (`layer_table`) and one of the bodies that decoding is compiled for, so that
groups of different widths need no launch of their own. Each unit, a group or in domain `pre` one of its KV heads, gets
programs by the bytes of its rows (Column.SHARE); which tiles of which row block a program takes is planned on the
device (`slices`), where what they find is joined too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..layer_table import SHARES
from ..table_fields import (
    BASIS_COLUMN,
    BODY,
    FIRST_HEAD,
    QK_16,
    QK_OFFSET,
    QK_RANK,
    QUERY_OFFSET,
    SHARE,
    V_16,
    V_OFFSET,
)
from ..tiles import piece_places
from .row_block import attended_rows
from .tasks import row_block_at

SLICE_FIELDS = tl.constexpr(3)
"""Numbers of a slice of a task's keys: the task, its first tile, its end."""

STEPS = tl.constexpr(SHARES)


@triton.jit
def programs_of(step, base, count):
    """Programs of a unit whose group has so many steps of the programs that a mean unit has; one a task at least."""
    return tl.maximum(count, base * step // STEPS)


@triton.jit
def step_of(part, used, EVEN: tl.constexpr):
    """Steps of a group by its row of the table, of those that are `used`; of EVEN units all have the mean's."""
    if EVEN:
        return tl.where(used, STEPS, 0)
    else:
        return tl.load(part + SHARE, mask=used, other=0)


@triton.jit
def programs_before(
    table, groups, row_size, base, count, HEADS: tl.constexpr, GROUPS_PADDED: tl.constexpr, EVEN: tl.constexpr
):
    """Programs of all units of each group, and of the groups before it: both [GROUPS_PADDED]."""
    group = tl.arange(0, GROUPS_PADDED)
    used = group < groups
    own = tl.where(used, programs_of(step_of(table + group * row_size, used, EVEN), base, count) * HEADS, 0)
    return own, tl.cumsum(own) - own


INTEGERS = [
    "groups", "row_size", "base", "count", "first_step", "slice_rows", "batch_size", "blocks", "seq_len", "query_batch",
    "query_head", "query_position", "key_block", "key_row", "value_block", "value_row", "table_stride", "mask_query",
    "rotation_stride", "basis_stride",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit
def _slice_of_unit(
    query, key, value, partial, partial_lse, part, slice_of, head, first_key, end_key, holes, block_table, mask, cos,
    sin, basis, constant, tasks, query_start_loc, batch_size, blocks, seq_len, query_batch, query_head, query_position,
    key_block, key_row, value_block, value_row, table_stride, mask_query, rotation_stride, basis_stride, scale, softcap,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRE: tl.constexpr, REBUILT: tl.constexpr, CONSTANT: tl.constexpr,
    HEADS: tl.constexpr, PACK: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, KEY_PAGE: tl.constexpr, MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIGN: tl.constexpr, KEY_ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One slice of one unit by the body of its group, `part` being the group's row of the table."""
    DTYPE: tl.constexpr = query.dtype.element_ty
    sequence, row_block, first_query, queries = row_block_at(
        tl.load(slice_of), tasks, query_start_loc, batch_size, blocks, seq_len, PACKED
    )
    rows = row_block * ROWS + tl.arange(0, ROWS)
    in_range = rows < queries * PACK
    place = first_query + rows // PACK
    first = tl.load(first_key + place, mask=in_range, other=0)
    end = tl.load(end_key + place, mask=in_range, other=0)

    key_base = key
    query_base = query + (first_query if PACKED else sequence) * query_batch
    first_head = tl.load(part + FIRST_HEAD)
    if PRE or REBUILT > 0:
        head_stride = query_head
        query_base += (first_head + head * PACK) * query_head
    else:
        head_stride = tl.multiple_of(tl.load(part + QK_RANK), ALIGN)
        query_base += tl.multiple_of(tl.load(part + QUERY_OFFSET), ALIGN)
    if REBUILT > 0:
        key_base += (first_head // PACK + head) * REBUILT
        key_places = ()
        for p in tl.static_range(len(KEYS)):
            key_places += ((KEYS[p][1], REBUILT - KEYS[p][1], KEYS[p][1], REBUILT - KEYS[p][1]),)
    else:
        key_base += tl.multiple_of(tl.load(part + QK_OFFSET), KEY_ALIGN)
        key_places = piece_places(part + QK_16, KEYS, DTYPE, ALIGN, KEY_ALIGN)
    value_places = piece_places(part + V_16, VALUES, DTYPE, ALIGN, VALUE_ALIGN)
    largest, total, weighted = attended_rows(
        query_base, head_stride, query_position, rows, in_range, place, first, end, tl.load(slice_of + 1),
        tl.load(slice_of + 2), sequence, key_base, value + tl.multiple_of(tl.load(part + V_OFFSET), VALUE_ALIGN),
        key_places, value_places, key_block, key_row, value_block, value_row, holes, block_table, table_stride, mask,
        mask_query, cos, sin, rotation_stride, basis + tl.multiple_of(tl.load(part + BASIS_COLUMN), ALIGN),
        basis_stride, head * (2 * HALF), constant + (first_head // PACK + head) * (2 * HALF), scale, softcap, KEYS,
        VALUES, PRE, CONSTANT, PACK, HALF, HALF_PADDED, ROWS, TILE, PAGE, KEY_PAGE, MASK, SOFT_CAP, ALIGN, KEY_ALIGN,
        DTYPE, PRECISION, COLUMNS,
    )  # fmt: skip
    safe_total = tl.where(total == 0.0, 1.0, total)
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(partial_lse + slot, largest + tl.log2(safe_total), mask=in_range)
    for p in tl.static_range(len(VALUES)):
        column = tl.arange(0, VALUES[p][2])[None, :]
        some = in_range[:, None] & (column < value_places[p][1])
        out = partial + (slot * WIDTH)[:, None] + value_places[p][0]
        tl.store(out + column, weighted[p] / safe_total[:, None], mask=some)


@triton.jit(do_not_specialize=INTEGERS)
def few_kernel(
    query, key, value, partial, partial_lse, table, slices, first_key, end_key, holes, block_table, mask, cos, sin,
    basis, constant, tasks, query_start_loc, groups, row_size, base, count, first_step, slice_rows, batch_size, blocks,
    seq_len, query_batch, query_head, query_position, key_block, key_row, value_block, value_row, table_stride,
    mask_query, rotation_stride, basis_stride, scale, softcap,
    BODIES: tl.constexpr, PRE: tl.constexpr, REBUILT: tl.constexpr, CONSTANT: tl.constexpr, HEADS: tl.constexpr,
    PACK: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS_PADDED: tl.constexpr, PAGE: tl.constexpr, KEY_PAGE: tl.constexpr, MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIGN: tl.constexpr, KEY_ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One slice of the keys of one unit into `partial` [programs, ROWS, WIDTH] and `partial_lse` [programs, ROWS] (base
    2), both float32; see `few_launch`. Heads of a group are fastest, since they read the same latents.

    Strides in units of ALIGN, of the key and value rows in KEY_ALIGN and VALUE_ALIGN. `row_size` is that of a group in
    `table`; `base`, `count`, `first_step`, `slice_rows`: as in `slices.Split`. REBUILT: numbers of a key that was
    rebuilt in memory, 0 where `key` has latents. BODIES: the pieces of keys and values of each body (`layer_table`); of
    keys that were rebuilt the second number of a piece is its first column.
    """
    program = tl.program_id(0)
    own, before = programs_before(table, groups, row_size, base, count, HEADS, GROUPS_PADDED, EVEN)
    behind = (before + own <= program) & (tl.arange(0, GROUPS_PADDED) < groups)
    group = tl.sum(behind.to(tl.int32), 0)
    rest = program - tl.sum(tl.where(tl.arange(0, GROUPS_PADDED) == group, before, 0), 0)
    part = table + group * row_size
    plan = step_of(part, group < groups, EVEN) - first_step
    slice_of = slices + (plan * slice_rows + rest // HEADS) * SLICE_FIELDS
    body = tl.load(part + BODY)
    # Of 64 bits: a large cache, or a long prompt, has more than 2^31 elements.
    query_batch = query_batch.to(tl.int64) * ALIGN
    query_head = query_head.to(tl.int64) * ALIGN
    query_position = query_position.to(tl.int64) * ALIGN
    key_block = key_block.to(tl.int64) * KEY_ALIGN
    key_row = key_row.to(tl.int64) * KEY_ALIGN
    value_block = value_block.to(tl.int64) * VALUE_ALIGN
    value_row = value_row.to(tl.int64) * VALUE_ALIGN
    for choice in tl.static_range(len(BODIES)):
        if body == choice:
            _slice_of_unit(
                query, key, value, partial, partial_lse, part, slice_of, rest % HEADS, first_key, end_key, holes,
                block_table, mask, cos, sin, basis, constant, tasks, query_start_loc, batch_size, blocks, seq_len,
                query_batch, query_head, query_position, key_block, key_row, value_block, value_row, table_stride,
                mask_query, rotation_stride * ALIGN, basis_stride * ALIGN, scale, softcap, BODIES[choice][0],
                BODIES[choice][1], PRE, REBUILT, CONSTANT, HEADS, PACK, HALF, HALF_PADDED, ROWS, TILE, WIDTH, PAGE,
                KEY_PAGE, MASK, SOFT_CAP, ALIGN, KEY_ALIGN, VALUE_ALIGN, PRECISION, COLUMNS, PACKED,
            )  # fmt: skip
