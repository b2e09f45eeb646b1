"""One row of a phase: what is measured, and how it is run so that a failure is that row's alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import RotorError
from .records import Setting, append, read, rows_done
from .runner import BROKEN


class Refused(Exception):
    """A backend does not take such inputs."""


class Skipped(Exception):
    """A program, device or file that a row needs is not there; the text says which."""


@dataclass(frozen=True)
class Case:
    """row: its name in the phase. about: what it is of, as part of its record. run: measures, and returns the rest."""

    row: str
    run: Callable[[], dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)


def run_cases(phase: str, cases: Iterable[Case], out: Path, setting: Setting) -> None:
    """Run every case that is not done, one after another, each with a record of how it ended.

    Ends the process with BROKEN where the GPU does not answer after a failure.
    """
    done = rows_done(read(out), setting, phase)
    for case in cases:
        if case.row in done:
            continue
        record = {"phase": phase, "row": case.row, **vars(setting), **case.about}
        append(out, {**record, "status": "begun"})
        begin = time.perf_counter()
        status, found = _ended(case)
        append(out, {**record, "status": status, "wall_s": round(time.perf_counter() - begin, 3), **found})
        if status == "failed" and not gpu_answers():
            sys.exit(BROKEN)


def _ended(case: Case) -> tuple[str, dict[str, Any]]:
    try:
        return "ok", case.run()
    except (Refused, torch.OutOfMemoryError) as error:
        return "refused", {"why": shortened(error)}
    except Skipped as error:
        return "skipped", {"why": shortened(error)}
    except RotorError as error:
        return "failed", {"why": shortened(error.message), "hint": error.hint}
    except Exception as error:  # a compiler's, a driver's, a library's: this row is red, the others go on
        why = f"{type(error).__name__}: {shortened(error)}"
        return "refused" if type(error).__name__ == "OutOfResources" else "failed", {"why": why}  # Triton's


def shortened(error: object) -> str:
    """On one line, its beginning."""
    return " ".join(str(error).split())[:500]


def gpu_answers() -> bool:
    """Whether the CUDA context, if there is one, still works: an illegal access ends it for the whole process."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        return float(torch.ones(1, device="cuda").sum()) == 1.0
    except RuntimeError:
        return False
