"""Processes that run jobs together, for the tests of sequence parallelism: started once, since imports take seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Job = Callable[..., Any]
"""job(group, ...) -> what can be pickled; `group` is that of the processes that run it."""

IMPORTED_ONCE = ["torch.distributed", "transformers.models.llama.modeling_llama", "transformers.generation"]
"""By the server that processes are forked from: they take seconds."""

groups: dict[int, Any] = {}
"""Of the first 1, 2, ... processes, in each of them."""


class Processes:
    """Processes of gloo on this machine, each of them a pool of one."""

    def __init__(self, count: int, folder: Path, timeout_s: float = 120.0) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        about = count, str(folder / "store"), timeout_s
        self.pools = [ProcessPoolExecutor(1, context, _join, (rank, *about)) for rank in range(count)]
        for pool in self.pools:
            pool.submit(os.getpid)  # starts it: all have to be there before any has joined

    def run(self, job: Job, *arguments: Any, count: int | None = None) -> list[Any]:
        """Results of the job in each of the first `count` processes; its error is raised."""
        return [one.result() for one in self._asked(job, arguments, count)]

    def outcomes(self, job: Job, *arguments: Any) -> list[Any]:
        """As `run`, but errors are returned, and BrokenProcessPool for a process that ended."""
        return [one.exception() or one.result() for one in self._asked(job, arguments, None)]

    def _asked(self, job: Job, arguments: tuple[Any, ...], count: int | None) -> list[Future[Any]]:
        pools = self.pools[:count]
        return [pool.submit(_call, job, len(pools), arguments) for pool in pools]

    def close(self) -> None:
        for pool in self.pools:
            pool.shutdown()


def _join(rank: int, count: int, store: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout)
    groups.update({n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, count + 1)})


def _call(job: Job, members: int, arguments: tuple[Any, ...]) -> Any:
    return job(groups[members], *arguments)
