"""Processes that run jobs together, for the tests of sequence parallelism: started once, since imports take seconds."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Job = Callable[..., Any]
"""job(group, ...) -> what can be pickled; `group` is that of the processes that run it."""


IMPORTED_ONCE = ["torch.distributed", "transformers.models.llama.modeling_llama", "transformers.generation"]
"""By the server that processes are forked from: they take seconds."""


class Processes:
    """Processes of gloo on this machine, in a group of all and in groups of the first 1, 2, ... of them."""

    def __init__(self, count: int, folder: Path, timeout_s: float = 120.0) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, str(folder / "store"), timeout_s, there)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def run(self, job: Job, *arguments: Any, count: int | None = None) -> list[Any]:
        """What the job returned in each of the first `count` processes; its error is raised."""
        found = self.outcomes(job, *arguments, count=count)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    def outcomes(self, job: Job, *arguments: Any, count: int | None = None) -> list[Any]:
        """As `run`, but errors are returned, and EOFError for a process that ended."""
        pipes = self.pipes[: count or len(self.pipes)]
        for pipe in pipes:
            pipe.send((job, len(pipes), arguments))
        found: list[Any] = []
        for pipe in pipes:
            try:
                found.append(pipe.recv())
            except EOFError as error:
                found.append(error)
        return found

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, count: int, store: str, timeout_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout)
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, count + 1)}
    while True:
        try:
            job, members, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(job(groups[members], *arguments))
        except Exception as error:
            if not hasattr(error, "hint"):
                traceback.print_exc()
            pipe.send(error)
