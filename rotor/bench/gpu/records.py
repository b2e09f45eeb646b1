"""Results as they come: JSON lines, each on disk before the next is measured, read again when a run goes on.

A record says what it is of (`phase` and `row`), by what it was measured (`device`, `commit`, `dry`), and how it ended
(`status`): `ok`; `failed`, which is tried again by another run; `refused`, by a backend that does not take such inputs;
`skipped`, for want of a program, device or file; and `begun`, of a row that is being measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError

DONE = ("ok", "refused")
"""What is not measured again."""

ENDED = (*DONE, "failed", "skipped")


@dataclass(frozen=True)
class Setting:
    """By what a record was measured: only equal ones count as measured. run: of which run it is."""

    run: str
    device: str
    commit: str | None
    dry: bool

    def of(self, record: dict[str, Any]) -> bool:
        return (record.get("device"), record.get("commit"), record.get("dry")) == (self.device, self.commit, self.dry)


def append(path: Path, record: dict[str, Any]) -> None:
    """Write a record behind the others; on disk when this returns.

    Raises:
        UsageError: it cannot be written.
    """
    line = json.dumps(record, allow_nan=False, default=str) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}.", "Give another file with -o.") from error


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in order; none where there is no file. A last line that was cut off is left out.

    Raises:
        UsageError: the file is not of records.
    """
    if not path.exists():
        return []
    records = []
    lines = path.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and {"phase", "row", "status"} <= record.keys():
            records.append(record)
        elif number < len(lines) - 1:
            raise UsageError(
                f"{path}: line {number + 1} is no result of rotor gpu.", "Give a file that it wrote, or a new one, -o."
            )
    return records


def cut_off_the_last(path: Path) -> None:
    """End a file with a whole line, so that more can be appended after a crash in the middle of one."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def latest(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The last record of each row that ended, by phase and row."""
    return {(r["phase"], r["row"]): r for r in records if r["status"] in ENDED}


def rows_done(records: Iterable[dict[str, Any]], setting: Setting, phase: str) -> set[str]:
    """The rows of a phase that are not measured again: those that ended in this run, or were measured before it."""
    return {
        r["row"]
        for r in records
        if r["phase"] == phase
        and setting.of(r)
        and (r["status"] in DONE or (r["status"] in ENDED and r.get("run") == setting.run))
    }


def unfinished(records: Iterable[dict[str, Any]], run: str, phase: str) -> dict[str, Any] | None:
    """The record of the row of this run that was begun last and has not ended."""
    begun = None
    for r in records:
        if r["phase"] != phase or r.get("run") != run:
            continue
        if r["status"] == "begun":
            begun = r
        elif begun is not None and r["row"] == begun["row"]:
            begun = None
    return begun
