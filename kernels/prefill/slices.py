# mypy: disable-error-code="no-untyped-def"
"""The keys of few queries split over programs: which program takes which tiles, and the joining of what they find.

A few new tokens against a long cache (a chunk of a prompt, tokens guessed by speculation) are so few row blocks that
most of a GPU would idle. The tiles of keys of each row block are then cut into slices, of at most so many tiles that
all slices of all sequences just have a program each: sequences of different lengths take as long as each other. How
many tiles that are follows from the ranges of keys on the device, so that a CUDA graph holds for other lengths.

Source: Flash-Decoding (Dao et al., 2023) for the split; FlashAttention for joining by the log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ahead import Variant
from ..decode.combine import joined
from ..key_ranges import PrefillKeys
from ..launch import launch
from .kernel import SLICE_FIELDS
from .tasks import row_block_at, row_blocks, task_count

LEAST_KEYS = 128
"""Of a slice: shorter ones would take as long as joining them."""

PLANNED = 16
"""Slices that one program of the plan writes down."""


@triton.jit(do_not_specialize=["batch_size", "blocks", "seq_len", "count", "programs"])
def plan_kernel(
    first_key, end_key, tasks, query_start_loc, slices, starts, batch_size, blocks, seq_len, count, programs,
    ROWS: tl.constexpr, PACK: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, TASKS: tl.constexpr,
    PLANNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """See `planned_slices`; every program makes the whole plan, and writes down PLANNED slices of it."""
    task = tl.arange(0, TASKS)
    some = task < count
    _, row_block, place, queries = row_block_at(
        tl.minimum(task, count - 1), tasks, query_start_loc, batch_size, blocks, seq_len, PACKED
    )
    row = row_block * ROWS
    first = tl.full((TASKS,), 2147483647, tl.int32)
    end = tl.zeros((TASKS,), tl.int32)
    for i in range((ROWS + PACK - 2) // PACK + 1):
        position = row // PACK + i
        valid = some & (position < queries) & (position * PACK < row + ROWS)
        own_first = tl.load(first_key + place + position, mask=valid, other=0)
        own_end = tl.load(end_key + place + position, mask=valid, other=0)
        attends = own_first < own_end
        first = tl.where(attends, tl.minimum(first, own_first), first)
        end = tl.where(attends, tl.maximum(end, own_end), end)
    first = tl.where(end > 0, first // TILE, 0)
    tiles = (end + TILE - 1) // TILE - first

    # The fewest tiles a slice with which there are enough programs: by halving, as many slices are too many.
    low = tl.full((), LEAST, tl.int32)
    high = tl.maximum(low, tl.max(tiles, 0))
    for _ in range(31):
        middle = (low + high) // 2
        enough = tl.sum((tiles + middle - 1) // middle, 0) <= programs
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    slices_of = (tiles + high - 1) // high
    until = tl.cumsum(slices_of, 0)
    since = until - slices_of
    if tl.program_id(0) == 0:
        tl.store(starts + task, since, mask=some)
        tl.store(starts + count, tl.sum(slices_of, 0))

    program = tl.program_id(0) * PLANNED + tl.arange(0, PLANNED)
    own = (since[None, :] <= program[:, None]) & (program[:, None] < until[None, :])
    # Slices of a task differ by a tile at most. Programs that are left over get the first task and none of its tiles.
    index = tl.sum(tl.where(own, program[:, None] - since[None, :], 0), 1)
    of_task = tl.sum(tl.where(own, tiles[None, :], 0), 1)
    among = tl.maximum(tl.sum(tl.where(own, slices_of[None, :], 0), 1), 1)
    begin = tl.sum(tl.where(own, first[None, :], 0), 1)
    out = slices + program * SLICE_FIELDS
    mask = program < programs
    tl.store(out, tl.sum(tl.where(own, task[None, :], 0), 1), mask=mask)
    tl.store(out + 1, begin + index * of_task // among, mask=mask)
    tl.store(out + 2, begin + (index + 1) * of_task // among, mask=mask)


def planned_slices(keys: PrefillKeys, rows: int, pack: int, tile: int, programs: int) -> tuple[Tensor, Tensor]:
    """The slices of the keys that the row blocks of a unit attend to; computed on the device, once for all layers.

    Args:
        rows, pack: of a row block, and query heads that share its keys; rows are (position, head) pairs.
        tile: keys of a tile. programs: how many share a unit, at least as many as it has tasks.
    Returns:
        [programs, 3], int32: the task of each, its first tile, and the end of its tiles. And [tasks + 1], int32, the
        slices before those of each task.
    """
    known = keys.plans.get((rows, pack, tile, programs))
    if known is None:
        tasks, device = task_count(keys, rows, pack), keys.first.device
        assert tasks <= programs  # `schedule.split_programs`
        slices = torch.empty(programs, SLICE_FIELDS.value, dtype=torch.int32, device=device)
        starts = torch.empty(tasks + 1, dtype=torch.int32, device=device)
        launch(
            plan_kernel, (triton.cdiv(programs, PLANNED),), keys.first, keys.end, *row_blocks(keys, rows, pack), slices,
            starts, keys.batch_size, triton.cdiv(keys.seq_len * pack, rows), keys.seq_len, tasks, programs,
            **plan_constants(rows, pack, tile, tasks), PACKED=keys.query_start_loc is not None,
        )  # fmt: skip
        known = keys.plans[rows, pack, tile, programs] = slices, starts
    return known


def plan_constants(rows: int, pack: int, tile: int, tasks: int) -> dict[str, int]:
    return {
        "ROWS": rows,
        "PACK": pack,
        "TILE": tile,
        "LEAST": max(1, LEAST_KEYS // tile),
        "TASKS": max(16, triton.next_power_of_2(tasks)),
        "PLANNED": PLANNED,
        "num_warps": 4,
    }


INTEGERS = ["batch_size", "units", "blocks", "seq_len", "output_offset", "output_position", "lse_offset", "lse_head"]
"""Not specialised on their values, as in the decode kernel."""


@triton.jit(do_not_specialize=INTEGERS)
def join_kernel(
    partial, partial_lse, output, lse, tasks, query_start_loc, starts, batch_size, units, blocks, seq_len,
    output_offset, output_position, lse_offset, lse_head,
    ROWS: tl.constexpr, PACK: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """output, lse of one row of a row block of one unit; grid (units x tasks, ROWS). See `join_slices`."""
    unit = tl.program_id(0) % units
    task = tl.program_id(0) // units
    row = tl.program_id(1)
    _, row_block, first_query, queries = row_block_at(task, tasks, query_start_loc, batch_size, blocks, seq_len, PACKED)
    row_in_all = row_block * ROWS + row
    if row_in_all < queries * PACK:
        first = tl.load(starts + task)
        end = tl.load(starts + task + 1)
        column = tl.arange(0, WIDTH)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        accumulator = tl.zeros((WIDTH,), tl.float32)
        for start in range(first, end, BLOCK):
            index = start + tl.arange(0, BLOCK)
            slot = (index.to(tl.int64) * units + unit) * ROWS + row
            largest, total, accumulator = joined(
                largest, total, accumulator, partial, partial_lse, slot, index < end, column, V, V
            )
        safe_total = tl.where(total == 0.0, 1.0, total)
        head = unit * PACK + row_in_all % PACK
        query = (first_query + row_in_all // PACK).to(tl.int64)
        place = output + query * output_position + output_offset + head * V
        tl.store(place + column, (accumulator / safe_total).to(output.dtype.element_ty), mask=column < V)
        natural = (largest + tl.log2(safe_total)) * 0.6931471805599453
        tl.store(lse + (lse_offset + head).to(tl.int64) * lse_head + query, natural)


def join_slices(
    partial: Tensor,
    partial_lse: Tensor,
    output: Tensor,
    lse: Tensor,
    keys: PrefillKeys,
    starts: Tensor,
    units: int,
    pack: int,
    output_offset: int,
    lse_offset: int,
) -> None:
    """Joins what programs found of their slices, by its log-sum-exp.

    Args:
        partial, partial_lse: [programs of a unit, units, rows, v_rank] and [programs of a unit, units, rows] (base 2),
            float32.
        output, lse: [queries of all sequences, width] and [num_heads, queries] (natural), float32: where it goes, in
            the columns and heads of the units from output_offset and lse_offset on.
        starts: as `planned_slices` gives it. pack: query heads of a unit.
    """
    rows, v_rank = partial.shape[2:]
    launch(
        join_kernel, (units * (len(starts) - 1), rows), partial, partial_lse, output, lse,
        *row_blocks(keys, rows, pack), starts, keys.batch_size, units, triton.cdiv(keys.seq_len * pack, rows),
        keys.seq_len, output_offset, output.stride(0), lse_offset, lse.stride(0), **join_constants(rows, pack, v_rank),
        PACKED=keys.query_start_loc is not None,
    )  # fmt: skip


def join_constants(rows: int, pack: int, v_rank: int) -> dict[str, int]:
    width = triton.next_power_of_2(v_rank)
    warps = 2 if width <= 256 else 4  # of 512 columns two would spill
    return {"ROWS": rows, "PACK": pack, "V": v_rank, "WIDTH": width, "BLOCK": 16, "num_warps": warps}


def slice_variants(constants: dict[str, Any], dtype: torch.dtype, packed: bool) -> list[Variant]:
    """What plans and joins the slices of a prefill kernel with these constants, for one task a unit."""
    rows, pack, tile, v_rank = (constants[name] for name in ("ROWS", "PACK", "TILE", "V"))
    plan, join = plan_constants(rows, pack, tile, 1), join_constants(rows, pack, v_rank)
    options = [{"num_warps": shape.pop("num_warps")} for shape in (plan, join)]
    places = dict.fromkeys(("tasks", "query_start_loc", "starts"), torch.int32)
    integers = places | dict.fromkeys(("first_key", "end_key", "slices"), torch.int32)
    numbers = {**dict.fromkeys(("partial", "partial_lse", "lse"), torch.float32), "output": dtype}
    flag = {"PACKED": packed}
    return [
        Variant(f"plan {rows}/{pack} rows, {tile} keys", plan_kernel, integers, plan | flag, (), options[0]),
        Variant(
            f"join {rows}/{pack} rows {v_rank}", join_kernel, numbers | places, join | flag, (), options[1],
        ),
    ]  # fmt: skip
