"""Progress of long work: the command line draws bars, a library user gets log messages."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

log = logging.getLogger("rotor")

Advance = Callable[[float], None]


class Progress:
    """Report progress without bars: messages go to the logger `rotor`. Subclasses draw."""

    @contextmanager
    def task(self, name: str, total: float | None, unit: str) -> Iterator[Advance]:
        """Show a task of `total` units; yields a function to call with the units done since its last call.

        A total of None means that the size is not known. Tasks follow one another and are never nested.
        """
        del name, total, unit
        yield lambda done: None

    def message(self, text: str) -> None:
        """Report one line of text."""
        log.info("%s", text)


class Stages(Progress):
    """Says of each task which of a command's stages it is, as in `gradients, stage 3 of 5`.

    Args:
        shown: shows the tasks. names: the stages, in order; a task that is none of them keeps its name.
    """

    def __init__(self, shown: Progress, names: Sequence[str]) -> None:
        self._shown, self._names = shown, list(names)

    @contextmanager
    def task(self, name: str, total: float | None, unit: str) -> Iterator[Advance]:
        if name in self._names:
            name = f"{name}, stage {self._names.index(name) + 1} of {len(self._names)}"
        with self._shown.task(name, total, unit) as advance:
            yield advance

    def message(self, text: str) -> None:
        self._shown.message(text)


def in_time(seconds: float) -> str:
    """Format a time in a readable unit."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def in_bytes(count: float) -> str:
    """Format a number of bytes in a readable unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size / 10:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


class StageTimes:
    """Seconds of each stage of a command, and peak resident bytes of the process at the stage's end."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        previous = self.stages.get(name, {"seconds": 0.0})["seconds"]
        self.stages[name] = {"seconds": round(previous + seconds, 3), "peak_bytes": peak}
        log.debug("%s: %.2f s, peak memory %.0f MB", name, seconds, peak / 1e6)

    @property
    def seconds(self) -> dict[str, float]:
        return {name: values["seconds"] for name, values in self.stages.items()}
