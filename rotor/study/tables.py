"""A table of summary.md, and its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Of summary.md. title: of the section that it begins; without one it belongs to the section before.

    text: a paragraph before it.
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


def point_cells(record: dict[str, Any]) -> list[str]:
    """Accuracy and KL of a measured point on the report split."""
    return [number(record["report"].get("accuracy")), number(record["report"].get("kl_div"), 5)]
