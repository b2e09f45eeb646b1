"""The processes that torchrun started: joined into a group, and each with its tokens of a prompt.

A process has two runs of tokens, one from either end, so that the causal mask leaves all the same amount of work.
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RotorError, UsageError

TIMEOUT = timedelta(minutes=5)
"""Time for which a process waits for another in any collective."""


def join_processes(device: str) -> str:
    """Form the default process group: gloo for CPUs and, where there are GPUs, NCCL for these.

    Args:
        device: the name that the user gave.
    Returns:
        The device; with several processes, `auto` and `cuda` become this process's GPU.
    Raises:
        UsageError: torchrun did not start this process. RotorError: the others were not found within TIMEOUT.
    """
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(value.isdigit() for value in values):
        raise UsageError(
            "the prompt is to be split over processes, and torchrun did not start this one.",
            "torchrun --nproc-per-node N -m rotor generate OUT ... --parallel sequence",
        )
    rank, count, local_rank = map(int, values)
    backend = "gloo"
    if torch.cuda.is_available():
        gpu = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        backend = "cpu:gloo,cuda:nccl"
        if count > 1 and device in ("auto", "cuda"):
            device = f"cuda:{gpu}"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RotorError(
            f"process {rank} of {count} did not find the others: {' '.join(str(error).split())[:200]}",
            "Start them all with torchrun, on several machines with the same --rdzv-endpoint.",
        ) from error
    return device


def token_runs(tokens: int, processes: int) -> list[list[range]]:
    """The tokens of each process: one run from the beginning and one from the end, as even as can be.

    Args:
        tokens: at least two a process.
    """
    edges = [tokens * i // (2 * processes) for i in range(2 * processes + 1)]
    runs = [range(start, end) for start, end in pairwise(edges)]
    return [[runs[process], runs[-1 - process]] for process in range(processes)]


def own_indices(tokens: int, processes: int, device: torch.device) -> list[Tensor]:
    """Indices of each process's tokens of a prompt."""
    return [torch.tensor([*head, *tail], device=device) for head, tail in token_runs(tokens, processes)]
