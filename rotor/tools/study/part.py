"""Parts of a study, and how they are found by name.

A part of your own is a subclass of `Part`: name it on the command line as `--parts my_part.py:MyPart`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import UsageError
from ...policies.registry import import_file
from .context import StudyContext
from .parts import PARTS
from .store import StudyStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CsvRow = dict[str, object]
"""A row of a CSV file, by column."""


@dataclass(frozen=True)
class Task:
    """One record that a part measures.

    key: of the record in the store; begins with the part's name and a slash. measure: gives the record, a dict or a
    dataclass.
    """

    key: str
    measure: Callable[[], object]


@dataclass(frozen=True)
class Table:
    """A table of summary.md.

    title: heading of the section that it begins; without one it belongs to the section before. text: a paragraph before
    it.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    text: str = ""

    def lines(self) -> list[str]:
        above = [line for part in (self.title and f"## {self.title}", self.text) if part for line in ("", part)]
        cells = (self.header, ["---"] * len(self.header), *self.rows) if self.header else ()
        return [*above, *([""] if cells else []), *(f"| {' | '.join(row)} |" for row in cells)]


def number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


class Part(ABC):
    """One part of a study.

    name: in `--parts`, and of its records. csv: the file that `rows` go to.
    """

    name: ClassVar[str]
    csv: ClassVar[str] = ""

    @abstractmethod
    def tasks(self, study: StudyContext) -> Iterator[Task]:
        """All records of the part, in the order in which they are measured. A task may use what earlier ones put into
        `study.store`."""

    def tables(self, store: StudyStore) -> Iterable[Table]:
        """Tables of summary.md, from the records that exist so far."""
        del store
        return ()

    def rows(self, store: StudyStore) -> Iterable[CsvRow]:
        """Rows of the file `csv`, by column."""
        del store
        return ()

    def plots(self, store: StudyStore) -> Mapping[str, Callable[[Figure], None]]:
        """Functions that draw on an empty figure of matplotlib, by file name; none without records."""
        del store
        return {}


def find_part(name: str) -> Part:
    """A part by its name, or by `FILE.py:CLASS`.

    Raises:
        UsageError: there is none of that name, or it is no Part.
    """
    file, _, class_name = name.rpartition(":")
    if name in PARTS:
        part: Any = getattr(importlib.import_module(f"{__package__}.parts.{name}"), name.capitalize())
    elif not file.endswith(".py"):
        raise UsageError(f"--parts {name}: expected some of {', '.join(PARTS)}, or FILE.py:CLASS.")
    elif not Path(file).is_file():
        raise UsageError(f"--parts {name}: no such file.", "Give FILE.py:CLASS, the class of a part.")
    else:
        part = getattr(import_file(Path(file)), class_name, None)
    if not (isinstance(part, type) and issubclass(part, Part)):
        raise UsageError(f"--parts {name}: is no subclass of rotor.tools.study.part.Part.")
    return part()
