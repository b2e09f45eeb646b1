"""Progress that counts what is done, and ends a task as Ctrl-C or a killed process does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from rotor.progress import Advance, Progress


class Counting(Progress):
    """Counts the units done of each task.

    done: units by the task's name. names: all tasks, in the order in which they began, with their stages' numbers.
    """

    def __init__(self) -> None:
        self.done: defaultdict[str, float] = defaultdict(float)
        self.names: list[str] = []

    @contextmanager
    def task(self, name: str, total: float | None, unit: str) -> Iterator[Advance]:
        del total, unit
        self.names.append(name)
        plain = name.partition(",")[0]

        def advance(done: float) -> None:
            self.done[plain] += done
            self.after(plain)

        yield advance

    def after(self, name: str) -> None:
        """Called when a part of a task is done."""


class Stopping(Counting):
    """Raises an error once so many units of a task are done, in the middle of what does them.

    Args:
        name: of the task. units: that are done before. error: KeyboardInterrupt is Ctrl-C; an error that nobody
            expects ends a process as if it were killed, without a chance to keep anything.
    """

    def __init__(self, name: str, units: float, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.name, self.units, self.error = name, units, error

    def after(self, name: str) -> None:
        if name == self.name and self.done[name] >= self.units:
            raise self.error
