"""Progress of long work; the command line draws it, a library user need not."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("rotor")

Advance = Callable[[float], None]


class Progress:
    """Shows no bars; subclasses do. Messages go to the logger `rotor`."""

    @contextmanager
    def task(self, name: str, total: float | None, unit: str) -> Iterator[Advance]:
        """Work of `total` units; yields a function to call with what was done since the last call.

        None: its size is not known. Tasks are one after the other, none inside another.
        """
        del name, total, unit
        yield lambda done: None

    def message(self, text: str) -> None:
        """Say one line about what happens."""
        log.info("%s", text)


def in_time(seconds: float) -> str:
    """Format a time in the unit that people would use."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def in_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size / 10:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


class StageTimes:
    """Seconds of each stage of a command, and the process's peak resident bytes at its end."""

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
