# mypy: disable-error-code="no-untyped-def"
"""The papers' greedy schedule of decoding tasks, on the device, so that it can be part of a CUDA graph.

Tasks are sorted by their work and given, one after another, to the program that has least. Source: FDC section 5.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ahead import Variant
from ..launch import launch

MOST_PROGRAMS = 512
"""Two for each of 256 SMs, more than today's GPUs have."""


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
        work: [parts, batch_size], int64: of each task.
        programs: how many share the tasks.
    Returns:
        The tasks in the order of their programs, [tasks], int32, and where each program's begin, [programs + 1], int32.
    """
    parts, batch_size = work.shape
    constants = assign_constants(parts, batch_size, programs)
    work = work.flatten()
    tasks = torch.argsort(work, descending=True, stable=True)
    owner = torch.empty_like(work)
    launch(assign_kernel, (1,), work[tasks], owner, work.numel(), programs, **constants)
    sorted_owner, order = torch.sort(owner, stable=True)
    bounds = torch.searchsorted(sorted_owner, torch.arange(programs + 1, device=work.device))
    return tasks[order].int(), bounds.int()


def assign_constants(parts: int, batch_size: int, programs: int) -> dict[str, int]:
    """As for MOST_PROGRAMS where the device has no more, so that one compiled kernel serves every such device."""
    tasks = triton.next_power_of_2(parts) * triton.next_power_of_2(batch_size)
    return {"PROGRAMS_PADDED": min(tasks, max(MOST_PROGRAMS, triton.next_power_of_2(programs))), "num_warps": 4}


def assign_variant(parts: int, batch_size: int) -> Variant:
    """What `longest_first` compiles for a layer of so many parts on a GPU of at most 256 SMs."""
    constants = assign_constants(parts, batch_size, MOST_PROGRAMS)
    options = {"num_warps": constants.pop("num_warps")}
    pointers = dict.fromkeys(("work", "owner"), torch.int64)
    return Variant(f"assign to {constants['PROGRAMS_PADDED']}", assign_kernel, pointers, dict(constants), (), options)
