"""Jobs run one after the other within a budget of time, their tasks by processes that a failure ends.

Processes are forked from one that has imported PyTorch and Triton and never touched the GPU, so that a new one is ready
in a second. One that failed, ended or ran out of time is never used again: an illegal access spoils all that a process
does after it. Records are written as they come.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .plan import DESCRIBE, DEVICE, Job, Record, Task

Said = Callable[[str], None]

ENOUGH_S = 3.0
"""A task is not begun with less time than this."""


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    task: Task | None = None
    started: float = 0.0
    until: float = 0.0


class Runner:
    """Runs jobs and writes their records.

    Args:
        out: JSON lines, appended to. about: what every line has. minutes: of all jobs together. say: of what goes on.
    """

    def __init__(self, out: Path, about: Record, minutes: float, say: Said) -> None:
        self.out, self.about, self.say = out, about, say
        self.begun = time.monotonic()
        self.end = self.begun + 60 * minutes
        self.records: list[Record] = []

    def describe(self) -> Record:
        """The device, or why there is none."""
        job = Job(DEVICE, "", 0, lambda: [DESCRIBE])
        self._run(job, self.end)
        return next(
            (record for record in self.records if "cuda" in record), {"cuda": False, "why": "it does not answer"}
        )

    def run(self, jobs: Iterable[Job]) -> list[Record]:
        """All that can run here, and what came of it."""
        left = deque(jobs)
        try:
            while left:
                job = left.popleft()
                if why := job.missing():
                    self.keep(job, "", {"skipped": why})
                    continue
                start = self._elapsed()
                self._run(job, self._until(job, list(left)))
                self.keep(job, "", {"job_s": round(self._elapsed() - start, 1)})
        finally:
            self.stop()
        return self.records

    def _until(self, job: Job, after: list[Job]) -> float:
        """When a job must end: so that those after it have what they are planned to take, flexible ones less where the
        budget is less."""
        after = [each for each in after if not each.missing()]
        left, both = self.end - time.monotonic(), [job, *after]
        fixed = sum(each.seconds for each in both if not each.flexible)
        flexible = sum(each.seconds for each in both if each.flexible)
        share = max(0.0, min(1.0, (left - fixed) / flexible)) if flexible else 0.0
        return self.end - sum(each.seconds * (share if each.flexible else 1.0) for each in after)

    def keep(self, job: Job, task: str, record: Record) -> None:
        whole = {"job": job.name, "task": task, **record, **self.about, "at_s": round(self._elapsed(), 1)}
        self.records.append(whole)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")

    def _elapsed(self) -> float:
        return time.monotonic() - self.begun

    _workers: tuple[_Worker, ...] = ()

    def stop(self) -> None:
        """End the processes that are left."""
        for worker in self._workers:
            _end(worker)
        self._workers = ()

    def _run(self, job: Job, until: float) -> None:
        waiting, counts = deque(job.tasks()), {"done": 0, "failed": 0}
        self.say(f"{self._elapsed():5.0f} s  {job.name}: {len(waiting)} task(s), until {until - self.begun:.0f} s")
        while waiting or any(worker.task for worker in self._workers):
            now = time.monotonic()
            idle = [worker for worker in self._workers if worker.task is None]
            busy = len(self._workers) - len(idle)
            while waiting and busy < job.at_once and until - now >= ENOUGH_S:
                worker = idle.pop() if idle else self._start()
                task = waiting.popleft()
                worker.task, worker.started, worker.until = task, now, min(until, now + task.limit_s)
                worker.pipe.send(task)
                busy += 1
            if waiting and until - now < ENOUGH_S:
                for task in waiting:
                    self.keep(job, task.name, {"skipped": "no time was left"})
                waiting.clear()
            self._listen(job, counts)
        for worker in self._workers[1:]:  # they would keep memory of the GPU
            self._drop(worker)
        self.say(f"{self._elapsed():5.0f} s  {job.name}: {counts['done']} done, {counts['failed']} failed")

    def _listen(self, job: Job, counts: dict[str, int]) -> None:
        """Take what workers say, until one is done or out of time."""
        busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
        if not busy:
            return
        first = min(worker.until for worker in busy.values())
        for pipe in wait(list(busy), timeout=max(0.0, first - time.monotonic())):
            self._hear(job, busy[pipe], counts)  # type: ignore[index]
        now = time.monotonic()
        for worker in busy.values():
            if worker.task is not None and now >= worker.until:
                self._failed(job, worker, counts, f"out of time after {now - worker.started:.0f} s")

    def _hear(self, job: Job, worker: _Worker, counts: dict[str, int]) -> None:
        assert worker.task is not None
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            self._failed(job, worker, counts, f"the process ended with exit code {worker.process.exitcode}")
            return
        if kind == "record":
            self.keep(job, worker.task.name, content)
        elif kind == "done":
            counts["done"] += 1
            worker.task = None
        else:
            self._failed(job, worker, counts, content)

    def _failed(self, job: Job, worker: _Worker, counts: dict[str, int], why: str) -> None:
        assert worker.task is not None
        counts["failed"] += 1
        self.keep(job, worker.task.name, {"failed": why})
        self.say(f"{self._elapsed():5.0f} s  {job.name}, {worker.task.name}: {why.strip().splitlines()[-1][:300]}")
        self._drop(worker)

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, [ours, *(w.pipe for w in self._workers)]), daemon=False)
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers = (*self._workers, worker)
        return worker

    def _drop(self, worker: _Worker) -> None:
        _end(worker)
        self._workers = tuple(other for other in self._workers if other is not worker)


def _end(worker: _Worker) -> None:
    """Kill a worker with what it started: its process group."""
    worker.pipe.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.kill()
    worker.process.join(10)


def _serve(pipe: Connection, others: list[Connection]) -> None:
    """A worker: tasks until one fails or the other side is gone."""
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for other in others:
        other.close()
    with suppress(EOFError, OSError):
        while True:
            task = pipe.recv()
            try:
                for record in find(task.function)(**task.arguments):
                    pipe.send(("record", record))
            except BaseException:
                pipe.send(("failed", traceback.format_exc()))
                break
            _release()
            pipe.send(("done", None))
    os._exit(0)  # nothing of a spoilt CUDA context is taken down in order


def _release() -> None:
    """Give memory of the GPU back."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def find(function: str) -> Callable[..., Iterable[Record]]:
    """ "times:decoding" as the function of that module here."""
    module, _, name = function.partition(":")
    found: Callable[..., Iterable[Record]] = getattr(importlib.import_module(f".{module}", __package__), name)
    return found
