"""Several processes under torchrun that share the calibration tokens; without torchrun, one process and no overhead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
"""Long enough for the first process to sample tokens while the others wait; torchrun ends them when one dies."""


@dataclass(frozen=True)
class Processes:
    """This process among those that torchrun started.

    rank: 0 is the one that writes and prints. count: of all. started: what torchrun says of them.
    """

    rank: int = 0
    count: int = 1
    started: Launched | None = None

    @classmethod
    def from_environment(cls) -> Processes:
        """Read torchrun's environment variables; joins the process group if there are several.

        Raises:
            UsageError: the processes are on several machines.
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
        return cls(started.rank, started.count, started)

    @property
    def local_count(self) -> int:
        """Processes on this machine."""
        return 1 if self.started is None else self.started.local_count

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, name: str) -> str:
        """Name the device: `auto` and `cuda` are this process's own GPU."""
        return name if self.started is None else self.started.device(name)

    def from_first(self, value: T | None) -> T:
        """The first process's value, in all of them."""
        if self.count > 1:
            box = [value]
            dist.broadcast_object_list(box, src=0)
            value = box[0]
        assert value is not None
        return value

    def add_up(self, statistics: LayerStatistics) -> None:
        """Sum statistics over the processes, and bring them to the CPU; every process gets the sums."""
        if self.count > 1:
            for name in sorted(statistics.sums):
                total = statistics.sums[name].contiguous()
                dist.all_reduce(total)
                statistics.sums[name] = total
            tokens = torch.tensor(statistics.tokens)
            dist.all_reduce(tokens)
            statistics.tokens = int(tokens)
        statistics.sums = {name: total.cpu() for name, total in statistics.sums.items()}

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all processes wait for each other at the end of the `with`; an error in one is raised in all of them."""
        if self.count == 1:
            yield
            return
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:  # whatever it is, the others must not wait for ever
            error = raised
        mine = None
        if error is not None:
            known = isinstance(error, RotorError)
            mine = (
                type(error) if known else RotorError,
                getattr(error, "message", repr(error)),
                getattr(error, "hint", ""),
            )
        everyone: list[Any] = [None] * self.count
        dist.all_gather_object(everyone, mine)
        if error is not None:
            raise error
        for rank, found in enumerate(everyone):
            if found is not None:
                kind, message, hint = found
                raise kind(f"process {rank} of {self.count}: {message}", hint)

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
