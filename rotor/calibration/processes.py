"""Several processes under torchrun that share the calibration tokens; without torchrun there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..bases.moments import LayerStatistics
from ..errors import RotorError, UsageError
from ..parallel.launch import Launched, launched

T = TypeVar("T")

TIMEOUT = timedelta(days=1)
"""Long enough for the first process to work alone while the others wait; torchrun ends them when one dies."""


@dataclass(frozen=True)
class Processes(Launched):
    """This process among those that torchrun started on this machine; rank 0 is the one that writes and prints."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @classmethod
    def from_environment(cls) -> Processes:
        """Read torchrun's environment variables, and join the process group if there are several processes.

        Raises:
            UsageError: they are on several machines.
        """
        started = launched()
        if started is None or started.count == 1:
            return cls()
        if started.local_count != started.count:
            raise UsageError(
                f"{started.count} processes, {started.local_count} of them here: they write to one folder on one "
                "machine.",
                "Start them with `torchrun --nproc-per-node N` on one machine.",
            )
        started.join(TIMEOUT)
        return cls(**vars(started))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def in_each(self, work: Callable[[], T]) -> T:
        """Work in every process, each with its own result; an error in one is raised in all."""
        if self.count == 1:
            return work()
        errors: list[Any] = [None] * self.count
        try:
            found = work()
        except Exception as error:  # whatever it is, the others must not wait for ever
            kind = type(error) if isinstance(error, RotorError) else RotorError
            dist.all_gather_object(errors, (kind, getattr(error, "message", repr(error)), getattr(error, "hint", "")))
            raise
        dist.all_gather_object(errors, None)
        for rank, raised in enumerate(errors):
            if raised is not None:
                kind, message, hint = raised
                raise kind(f"process {rank} of {self.count}: {message}", hint)
        return found

    def in_first(self, work: Callable[[], T]) -> T:
        """Work in the first process, whose result or error all get."""
        box: list[Any] = [self.in_each(lambda: work() if self.is_first else None)]
        if self.count > 1:
            dist.broadcast_object_list(box, src=0)
        result: T = box[0]
        return result

    def merge(self, statistics: LayerStatistics) -> None:
        """Sum statistics over the processes; every one gets the sums. They are on the CPU."""
        if self.count > 1:
            tokens = torch.tensor(statistics.tokens)
            for total in (*(statistics.sums[name] for name in sorted(statistics.sums)), tokens):
                dist.all_reduce(total)
            statistics.tokens = int(tokens)

    def share(self, rows: Tensor, batch_rows: int) -> Tensor:
        """This process's rows: whole batches, so that every row goes through the model in the same company as alone.

        Raises:
            UsageError: there are fewer batches than processes.
        """
        batches = rows.split(batch_rows)
        if len(batches) < self.count:
            raise UsageError(
                f"{len(rows)} rows of tokens make {len(batches)} batches of {batch_rows}, for {self.count} processes.",
                "Lower --batch-tokens, raise --set tokens.count=N, or start fewer processes.",
            )
        bounds = [len(batches) * i // self.count for i in range(self.count + 1)]
        return torch.cat(batches[bounds[self.rank] : bounds[self.rank + 1]])


ALONE = Processes()
