# mypy: disable-error-code="no-untyped-def"
"""The row blocks of all sequences in a line: where each of them is, for sequences of equal lengths and of any.

Equal lengths are arithmetic. Of packed queries a table says which sequence and which of its row blocks a task is; it is
made on the device, once for all layers of a step, from as many tasks as the host knows to suffice: those that there
are not come last, and find no query to serve. Either way the row blocks that meet most keys come first.

Source: vLLM's unified attention kernel for the bound (tokens / rows + sequences); FDC section 5.3 for the order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..key_ranges import PrefillKeys

TASK_FIELDS = tl.constexpr(2)
"""Numbers of a task of packed queries: the sequence and its row block."""


@triton.jit
def row_block_at(task, tasks, query_start_loc, batch_size, blocks, seq_len, PACKED: tl.constexpr):
    """The sequence and the row block that a task is; the sequence's first query among all, and how many it has."""
    if PACKED:
        sequence = tl.load(tasks + task * TASK_FIELDS)
        row_block = tl.load(tasks + task * TASK_FIELDS + 1)
        first_query = tl.load(query_start_loc + sequence)
        return sequence, row_block, first_query, tl.load(query_start_loc + sequence + 1) - first_query
    else:
        sequence = task % batch_size
        return sequence, blocks - 1 - task // batch_size, sequence * seq_len, seq_len + 0 * task


def task_count(keys: PrefillKeys, rows: int, pack: int) -> int:
    """Row blocks of all sequences; of packed queries as many as there can be.

    Args:
        rows, pack: of a row block, and query heads that share its keys; rows are (position, head) pairs.
    """
    most = keys.batch_size * triton.cdiv(keys.seq_len * pack, rows)
    return most if keys.query_start_loc is None else min(most, keys.first.numel() * pack // rows + keys.batch_size)


def packed_tasks(keys: PrefillKeys, rows: int, pack: int) -> Tensor:
    """[`task_count`, 2], int32: the sequence and the row block of each task of packed queries, on their device."""
    known = keys.tasks.get((rows, pack))
    if known is None:
        assert keys.query_start_loc is not None
        start = keys.query_start_loc.long()
        until = ((start.diff() * pack + rows - 1) // rows).cumsum(0)
        task = torch.arange(task_count(keys, rows, pack), device=start.device)
        # Those behind the last sequence's row blocks are row blocks that it does not have.
        sequence = torch.searchsorted(until, task, right=True).clamp(max=keys.batch_size - 1)
        row_block = task - until[sequence] + ((start[sequence + 1] - start[sequence]) * pack + rows - 1) // rows
        first = start[sequence] + row_block * rows // pack
        last = start[sequence] + ((row_block + 1) * rows - 1) // pack
        there = first < start[sequence + 1]
        last = torch.minimum(last, start[sequence + 1] - 1).clamp(min=0)
        met = keys.end[last] - keys.first[first.clamp(max=keys.first.numel() - 1)]
        order = torch.argsort(torch.where(there, met, -1), descending=True, stable=True)
        known = keys.tasks[rows, pack] = torch.stack([sequence, row_block], 1)[order].int()
    return known


def row_blocks(keys: PrefillKeys, rows: int, pack: int) -> tuple[Tensor, Tensor]:
    """`tasks` and `query_start_loc` for `row_block_at`; any tensor stands for them where lengths are equal."""
    if keys.query_start_loc is None:
        return keys.first, keys.first
    return packed_tasks(keys, rows, pack), keys.query_start_loc
