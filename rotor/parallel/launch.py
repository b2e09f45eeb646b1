"""The processes that torchrun started: what it says of them, and how they find each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import RotorError


@dataclass(frozen=True)
class Launched:
    """One of several processes.

    rank: among all of them. count: of all. local_rank, local_count: on this machine.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int

    def device(self, name: str) -> str:
        """Name the device: of several processes `auto` and `cuda` are this one's own GPU."""
        if self.count > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank % torch.cuda.device_count()}"
        return name

    def join(self, timeout: timedelta) -> None:
        """Form the default process group, unless there is one: gloo for CPUs and, where there are GPUs, NCCL for these.

        Args:
            timeout: how long a process waits for another in any collective.
        Raises:
            RotorError: the others were not found in that time.
        """
        if dist.is_initialized():
            return
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise RotorError(
                f"process {self.rank} of {self.count} did not find the others: {' '.join(str(error).split())[:200]}",
                "Start them all with torchrun, on several machines with the same --rdzv-endpoint.",
            ) from error

    def leave(self) -> None:
        """Give the default process group up."""
        if dist.is_initialized():
            dist.destroy_process_group()


def launched() -> Launched | None:
    """What torchrun's environment variables say; None without them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    return Launched(*map(int, values)) if all(value.isdigit() for value in values) else None
