# mypy: disable-error-code="no-untyped-def"
"""The papers' greedy schedule of decoding tasks, on the device, so that it can be part of a CUDA graph.

Tasks are sorted by their work and given, one after another, to the program that has least. Source: FDC section 5.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["count", "programs"])
def assign_kernel(work, owner, count, programs, PROGRAMS_PADDED: tl.constexpr):
    """owner[i] = the program with the least work so far; `work` [count], int64, in descending order. One program."""
    column = tl.arange(0, PROGRAMS_PADDED)
    load = tl.where(column < programs, 0, 1 << 62).to(tl.int64)
    for task in range(count):
        least = tl.argmin(load, 0)
        tl.store(owner + task, least)
        load = tl.where(column == least, load + tl.load(work + task), load)


def longest_first(work: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """Distribute tasks over programs.

    Args:
        work: [tasks], int64.
        programs: how many share the tasks.
    Returns:
        The tasks in the order of their programs, [tasks], int32, and where each program's begin, [programs + 1], int32.
    """
    tasks = torch.argsort(work, descending=True, stable=True)
    owner = torch.empty_like(work)
    assign_kernel[(1,)](work[tasks], owner, work.numel(), programs, triton.next_power_of_2(programs), num_warps=4)
    sorted_owner, order = torch.sort(owner, stable=True)
    bounds = torch.searchsorted(sorted_owner, torch.arange(programs + 1, device=work.device))
    return tasks[order].int(), bounds.int()
