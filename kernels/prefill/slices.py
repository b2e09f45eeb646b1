# mypy: disable-error-code="no-untyped-def"
"""The keys of few queries split over programs: which program takes which tiles, and the joining of what they find.

A few new tokens against a long cache (a chunk of a prompt, tokens guessed by speculation) are so few row blocks that
most of a GPU would idle. The tiles of keys of each row block are then cut into slices, of at most so many tiles that
all slices of all sequences just have a program each: sequences of different lengths take as long as each other. How
many tiles that are follows from the ranges of keys on the device, so that a CUDA graph holds for other lengths.

Groups of wider rows get more programs (`Split`). A plan is made for every number of programs that a unit may have, so
that layers of other widths find theirs in it too.

Source: Flash-Decoding (Dao et al., 2023) for the split; FlashAttention for joining by the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ahead import Variant
from ..decode.combine import joined
from ..key_ranges import PrefillKeys
from ..launch import launch
from ..layer_table import MOST_SHARES, SHARES
from ..table_fields import FIRST_HEAD, OUTPUT_OFFSET, V_RANK
from .few_kernel import SLICE_FIELDS, programs_before, programs_of, step_of
from .tasks import row_block_at, row_blocks

LEAST_KEYS = 128
"""Of a slice: shorter ones would take as long as joining them."""

PLANNED = 16
"""Slices that one program of the plan writes down."""


@dataclass(frozen=True)
class Split:
    """How the programs of a launch are shared out over the units of a layer.

    base: programs of a unit of mean work. count: tasks of a unit, each of which has at least one program.
    steps: of each group, its work as `Column.SHARE` has it, SHARES for the mean. heads: units of a group.
    """

    base: int
    count: int
    steps: tuple[int, ...]
    heads: int

    @classmethod
    def of(cls, work: Sequence[int], heads: int, count: int, programs: int) -> Split:
        """work: of each group as `Column.SHARE` has it. programs: of all units together."""
        return cls(programs // (heads * len(work)), count, tuple(work), heads)

    @property
    def even(self) -> bool:
        """Whether all units have as many programs."""
        return all(step == SHARES for step in self.steps)

    @property
    def planned(self) -> tuple[int, int]:
        """The first and the last step for which there is a plan; all that there may be, unless groups are even."""
        return (SHARES, SHARES) if self.even else (1, MOST_SHARES)

    def programs_of(self, step: int) -> int:
        """Programs of a unit."""
        return max(self.count, self.base * step // SHARES)

    @property
    def programs(self) -> int:
        """Of all units."""
        return self.heads * sum(self.programs_of(step) for step in self.steps)

    @property
    def slice_rows(self) -> int:
        """Slices of a plan at the most."""
        return self.programs_of(self.planned[1])


@triton.jit(do_not_specialize=["batch_size", "blocks", "seq_len", "count", "base", "first_step", "slice_rows"])
def plan_kernel(
    first_key, end_key, tasks, query_start_loc, slices, starts, batch_size, blocks, seq_len, count, base, first_step,
    slice_rows, ROWS: tl.constexpr, PACK: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, TASKS: tl.constexpr,
    PLANNED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """See `planned_slices`; every program makes a whole plan, and writes down PLANNED slices of it. Grid (programs of
    the longest plan, plans).
    """
    programs = programs_of(first_step + tl.program_id(1), base, count)
    slices += tl.program_id(1) * slice_rows * SLICE_FIELDS
    starts += tl.program_id(1) * (count + 1)
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


def planned_slices(keys: PrefillKeys, rows: int, pack: int, tile: int, split: Split) -> tuple[Tensor, Tensor]:
    """The slices of the keys that the row blocks of a unit attend to; computed on the device, once for all layers.

    Args:
        rows, pack: of a row block, and query heads that share its keys; rows are (position, head) pairs.
        tile: keys of a tile. split: how many programs a unit has, of any step that it may be at.
    Returns:
        [plans, programs, 3], int32: for each step `split` plans for and each program of a unit at it, the task, its
        first tile, and the end of its tiles. And [plans, tasks + 1], int32, the slices before those of each task.
    """
    tasks, device = split.count, keys.first.device
    first, last = split.planned
    place = rows, pack, tile, split.base, last
    known = keys.plans.get(place)
    if known is None:
        slices = torch.empty(last - first + 1, split.slice_rows, SLICE_FIELDS.value, dtype=torch.int32, device=device)
        starts = torch.empty(last - first + 1, tasks + 1, dtype=torch.int32, device=device)
        launch(
            plan_kernel, (triton.cdiv(split.slice_rows, PLANNED), len(slices)), keys.first, keys.end,
            *row_blocks(keys, rows, pack), slices, starts, keys.batch_size, triton.cdiv(keys.seq_len * pack, rows),
            keys.seq_len, tasks, split.base, first, split.slice_rows, **plan_constants(rows, pack, tile, tasks),
            PACKED=keys.query_start_loc is not None,
        )  # fmt: skip
        known = keys.plans[place] = slices, starts
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


INTEGERS = [
    "groups", "row_size", "base", "count", "first_step", "batch_size", "blocks", "seq_len", "output_position",
    "lse_head",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit(do_not_specialize=INTEGERS)
def join_kernel(
    partial, partial_lse, output, lse, table, tasks, query_start_loc, starts, groups, row_size, base, count, first_step,
    batch_size, blocks, seq_len, output_position, lse_head,
    ROWS: tl.constexpr, PACK: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """output, lse of one row of a row block of one unit; grid (units x tasks, ROWS). See `join_slices`."""
    units = groups * HEADS
    unit = tl.program_id(0) % units
    task = tl.program_id(0) // units
    group = unit // HEADS
    head_of_group = unit % HEADS
    row = tl.program_id(1)
    _, row_block, first_query, queries = row_block_at(task, tasks, query_start_loc, batch_size, blocks, seq_len, PACKED)
    row_in_all = row_block * ROWS + row
    if row_in_all < queries * PACK:
        part = table + group * row_size
        before = programs_before(table, groups, row_size, base, count, HEADS, GROUPS_PADDED, EVEN)[1]
        own = tl.sum(tl.where(tl.arange(0, GROUPS_PADDED) == group, before, 0), 0) + head_of_group
        plan = step_of(part, group < groups, EVEN) - first_step
        start_of = starts + plan * (count + 1) + task
        first = tl.load(start_of)
        end = tl.load(start_of + 1)
        width = tl.load(part + V_RANK)
        column = tl.arange(0, WIDTH)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        accumulator = tl.zeros((WIDTH,), tl.float32)
        for start in range(first, end, BLOCK):
            index = start + tl.arange(0, BLOCK)
            slot = (own + index * HEADS).to(tl.int64) * ROWS + row
            largest, total, accumulator = joined(
                largest, total, accumulator, partial, partial_lse, slot, index < end, column, width, WIDTH
            )
        safe_total = tl.where(total == 0.0, 1.0, total)
        head = head_of_group * PACK + row_in_all % PACK
        query = (first_query + row_in_all // PACK).to(tl.int64)
        place = output + query * output_position + tl.load(part + OUTPUT_OFFSET) + head * width
        tl.store(place + column, (accumulator / safe_total).to(output.dtype.element_ty), mask=column < width)
        natural = (largest + tl.log2(safe_total)) * 0.6931471805599453
        tl.store(lse + (tl.load(part + FIRST_HEAD) + head).to(tl.int64) * lse_head + query, natural)


def join_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """By those of the kernel whose results are joined."""
    shared = {name: constants[name] for name in ("ROWS", "PACK", "HEADS", "WIDTH", "GROUPS_PADDED", "EVEN")}
    warps = 2 if constants["WIDTH"] <= 256 else 4  # of 512 columns two would spill
    return shared | {"BLOCK": 16, "num_warps": warps}


def slice_variants(constants: dict[str, Any], dtype: torch.dtype, packed: bool) -> list[Variant]:
    """What plans and joins the slices of a kernel of few queries with these constants, for one task a unit."""
    rows, pack, tile, width = (constants[name] for name in ("ROWS", "PACK", "TILE", "WIDTH"))
    plan, join = plan_constants(rows, pack, tile, 1), join_constants(constants)
    options = [{"num_warps": shape.pop("num_warps")} for shape in (plan, join)]
    places = dict.fromkeys(("table", "tasks", "query_start_loc", "starts"), torch.int32)
    integers = places | dict.fromkeys(("first_key", "end_key", "slices"), torch.int32)
    numbers = {**dict.fromkeys(("partial", "partial_lse", "lse"), torch.float32), "output": dtype}
    flag = {"PACKED": packed}
    return [
        Variant(f"plan {rows}/{pack} rows, {tile} keys", plan_kernel, integers, plan | flag, (), options[0]),
        Variant(
            f"join {rows}/{pack} rows {width}", join_kernel, numbers | places, join | flag, (), options[1],
        ),
    ]  # fmt: skip
