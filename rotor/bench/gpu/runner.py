"""Run the phases: each in a process of its own, within its time, going on after what crashed or hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ...errors import UsageError
from .phases import NAMES, PHASES, Phase
from .records import append, cut_off_the_last, read, unfinished

BROKEN = 75
"""Exit code of a process whose CUDA context no longer answers: another one is to go on."""

POLL_S, GRACE_S = 0.1, 10.0
"""Between looks at a process; and from asking it to end to ending it."""

LEAST_S = 5.0
"""A phase with less time than this is not begun."""

WHOLE = "the whole phase"


@dataclass(frozen=True)
class GpuSettings:
    """out: JSON lines. minutes: of everything. phases: by name, in the order of PHASES. checkpoint: for vLLM."""

    out: Path
    minutes: float = 40.0
    phases: tuple[str, ...] = NAMES
    dry: bool = False
    checkpoint: Path | None = None

    def check(self, known: Sequence[str] = NAMES) -> None:
        """Raises UsageError for a phase that is none, or a file that cannot be written."""
        for name in self.phases:
            if name not in known:
                raise UsageError(f"--phases: {name!r} is none of {', '.join(known)}.", "Example: --phases tests,decode")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.open("a").close()
        except OSError as error:
            raise UsageError(f"{self.out}: {error.strerror or error}.", "Give another file with -o.") from error

    def command(self, phase: str, run: str) -> list[str]:
        """What starts the process of a phase."""
        call = [sys.executable, "-m", "rotor.bench.gpu", phase, "--out", str(self.out), "--run", run]
        call += ["--dry"] if self.dry else []
        return call if self.checkpoint is None else [*call, "--checkpoint", str(self.checkpoint.resolve())]


def run_phases(
    settings: GpuSettings,
    told: Callable[[str], object],
    phases: Sequence[Phase] = PHASES,
    command: Callable[[str, str], list[str]] | None = None,
) -> str:
    """Run the phases that were asked for; time that one leaves over is the later ones'.

    Args:
        told: gets a line at the end of each phase. command: what starts a phase's process, by name and run.
    Returns:
        The name of this run, which its records carry.
    """
    settings.check([phase.name for phase in phases])
    cut_off_the_last(settings.out)
    run = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")
    append(settings.out, {"phase": "run", "row": "start", "run": run, "dry": settings.dry, "status": "begun"})
    end = time.monotonic() + 60 * settings.minutes
    chosen = [phase for phase in phases if phase.name in settings.phases]
    for index, phase in enumerate(chosen):
        left = end - time.monotonic()
        later = sum(other.limit_s for other in chosen[index + 1 :])
        limit = min(left, max(phase.limit_s, left - later))
        if limit < LEAST_S:
            append(settings.out, _of_phase(phase, run, settings, "skipped", "no time was left for it"))
        else:
            _run_phase(settings, phase, run, limit, (command or settings.command)(phase.name, run))
        told(f"{phase.name}: {_counted(read(settings.out), run, phase.name)}")
    return run


def _run_phase(settings: GpuSettings, phase: Phase, run: str, limit_s: float, call: list[str]) -> None:
    """Start the phase's process, and again after a row that ended it, until it is through or its time is over."""
    end = time.monotonic() + limit_s
    with settings.out.with_suffix(".log").open("ab") as log:
        while True:
            code, over = _watch(settings, phase, run, end, call, log)
            cut_off_the_last(settings.out)
            begun = unfinished(read(settings.out), run, phase.name)
            if code == 0 and begun is None:
                return
            if code == BROKEN and begun is None:
                continue  # the row that broke it has its record
            why = f"the process ended with {code}"
            if over == "row":
                why = f"took longer than {phase.row_limit_s:g} s, the limit of a row"
            elif over == "phase":
                why = f"the phase's {limit_s:.0f} s were over"
            status = "skipped" if over == "phase" else "failed"
            if begun is None:
                where = f"{why}; what it said is in {settings.out.with_suffix('.log').name}"
                append(settings.out, _of_phase(phase, run, settings, status, where))
                return
            append(settings.out, {**begun, "status": status, "why": why})
            if over == "phase":
                return


def _watch(
    settings: GpuSettings, phase: Phase, run: str, end: float, call: list[str], log: IO[bytes]
) -> tuple[int, str | None]:
    """Wait for a process; its exit code, and whose time was over if it was ended."""
    process = subprocess.Popen(call, stdout=log, stderr=log, start_new_session=True)
    over = None
    try:
        changed, size = time.monotonic(), settings.out.stat().st_size
        while process.poll() is None:
            now, found = time.monotonic(), settings.out.stat().st_size
            if found != size:
                changed, size = now, found
            in_row = now - changed > phase.row_limit_s and unfinished(read(settings.out), run, phase.name)
            over = "phase" if now > end else "row" if in_row else None
            if over is not None:
                break
            time.sleep(POLL_S)
    finally:
        end_group(process)
    return process.returncode, over


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads a group, and all of the group."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(patience)
            break
        except subprocess.TimeoutExpired:
            continue


def _of_phase(phase: Phase, run: str, settings: GpuSettings, status: str, why: str) -> dict[str, Any]:
    return {"phase": phase.name, "row": WHOLE, "run": run, "dry": settings.dry, "status": status, "why": why}


def _counted(records: list[dict[str, Any]], run: str, phase: str) -> str:
    """`12 ok, 1 failed`, of this run; what was known before it is not counted."""
    ended = [r["status"] for r in records if r["phase"] == phase and r.get("run") == run and r["status"] != "begun"]
    return ", ".join(f"{ended.count(s)} {s}" for s in dict.fromkeys(ended)) or "nothing left to measure"
