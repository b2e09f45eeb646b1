"""The terminal: results on stdout, messages and progress bars on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from ..checkpoint.files import json_text
from ..logs import is_first_process, log, printable
from ..progress import Advance, Progress, in_time

SECONDS_BETWEEN_LINES = 30.0
"""Seconds between lines about a task that has no bar."""

stdout = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 132)
stderr = Console(stderr=True)


class ConsoleProgress(Progress):
    """Bars on stderr, which is a terminal."""

    @contextmanager
    def task(self, name: str, total: float | None, unit: str) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description:18}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True) if total is not None else TimeElapsedColumn(),
        )
        with RichProgress(*columns, console=stderr, transient=True) as bars:
            task = bars.add_task(name, total=total)
            yield lambda done: bars.advance(task, done)


class LineProgress(Progress):
    """A line now and then for a long task, where stderr is no terminal: what is done, and when the rest will be.

    Args:
        between_s: least time between lines. clock: tells the time in seconds.
    """

    def __init__(self, between_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._between_s, self._clock = between_s, clock

    @contextmanager
    def task(self, name: str, total: float | None, unit: str) -> Iterator[Advance]:
        done, start = 0.0, self._clock()
        said = start

        def advance(more: float) -> None:
            nonlocal done, said
            done, now = done + more, self._clock()
            if total is None or not 0 < done < total or now - said < self._between_s:
                return
            said = now
            left = (now - start) * (total - done) / done
            self.message(f"{name}: {done / total:.0%} of {total:,.0f} {unit}, about {in_time(left)} left")

        yield advance


class ConsoleHandler(logging.Handler):
    """Shows log messages on stderr, above the bars, if there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a terminal that is gone ends no work
            stderr.print(printable(record.getMessage()), highlight=False, markup=False, soft_wrap=True)


def show_progress(quiet: bool, verbose: bool = False) -> Progress:
    """Send messages to stderr, and return the progress that is shown there.

    Args:
        quiet: nothing is shown, results neither. verbose: messages that only the log file has otherwise are shown too.
    """
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    stdout.quiet = quiet
    silent = quiet or not is_first_process()
    if silent or not stderr.is_terminal:
        disable_progress_bars()  # those of downloads
    for old in [handler for handler in log.handlers if isinstance(handler, ConsoleHandler)]:
        log.removeHandler(old)
    shown = logging.DEBUG if verbose else logging.INFO
    log.addHandler(ConsoleHandler(logging.CRITICAL if silent else shown))
    log.setLevel(shown)
    if silent:
        return Progress()
    return ConsoleProgress() if stderr.is_terminal else LineProgress(SECONDS_BETWEEN_LINES)


def say(text: str) -> None:
    """Print a line on stdout as it is, without what a terminal would act on."""
    stdout.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def print_json(data: object) -> None:
    print(json_text(data))


def print_seconds(seconds: dict[str, float]) -> None:
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    say(f"Seconds: {parts}; together {in_time(sum(seconds.values()))}")


def print_pairs(*rows: tuple[str, str]) -> None:
    """Print two columns: a name, and its value."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(_cell, row))
    stdout.print(table, highlight=False)


def print_table(title: str | None, left: Sequence[str], right: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with columns of text, then columns of numbers; the first column may break anywhere."""
    table = Table(title=None if title is None else _cell(title), title_justify="left")
    for index, column in enumerate(left):
        table.add_column(_cell(column), overflow="fold" if index == 0 else "ellipsis")
    for column in right:
        table.add_column(_cell(column), justify="right")
    for row in rows:
        table.add_row(*map(_cell, row))
    stdout.print(table)


def _cell(value: object) -> Text:
    """A cell of a table; brackets in it are no markup."""
    return value if isinstance(value, Text) else Text(printable(str(value)))
