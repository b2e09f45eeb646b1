"""A whole run of `python artifacts/gpu`: on a GPU the jobs, elsewhere what they would be."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rotor.errors import UsageError
from rotor.tools.bench.records import provenance

from .plan import DEVICE, Job, Record, jobs
from .runner import Runner
from .subjects import gpu_subjects
from .summary import markdown

MINUTES = 9.0
"""Minutes of the whole plan."""


@dataclass(frozen=True)
class Session:
    """records: as in the file. summary: of them, Markdown. cuda: whether there is a GPU; without one nothing ran."""

    records: list[Record]
    summary: str
    cuda: bool

    @property
    def failed(self) -> bool:
        return any("failed" in record or record.get("outcome") == "failed" for record in self.records)


def run(
    out: Path,
    minutes: float,
    command: str,
    say: Callable[[str], None],
    only: Collection[str] = (),
    layouts: Sequence[str] = (),
) -> Session:
    """Describe the device, then run the jobs within the minutes; what they say is appended to `out` as it comes.

    Args:
        only: names of jobs, none for all. layouts: names of layouts, none for all. say: gets lines about what goes on.
    Raises:
        UsageError: no job, or layout, of that name.
    """
    if unknown := [name for name in layouts if name not in gpu_subjects()]:
        raise UsageError(f"--layouts {unknown[0]}: no layout of that name.", f"Layouts: {', '.join(gpu_subjects())}.")
    planned = jobs(out, layouts)
    names = [job.name for job in planned]
    if unknown := [name for name in only if name not in names]:
        raise UsageError(f"--only {unknown[0]}: no job of that name.", f"Jobs: {', '.join(names)}.")
    chosen = [job for job in planned if not only or job.name in only or job.name == DEVICE]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("", "utf-8")
    about = provenance(command)
    del about["command"]
    _import()
    runner = Runner(out, about, minutes, say)
    try:
        described = runner.describe()
        if not described["cuda"]:
            return Session(runner.records, plan_page(chosen, described["why"]), cuda=False)
        about["device"] = described["gpu"]["name"]
        try:
            runner.run(chosen)
        finally:
            summary = markdown(runner.records)
            out.with_suffix(".md").write_text(summary, "utf-8")
    finally:
        runner.stop()
    return Session(runner.records, summary, cuda=True)


def _import() -> None:
    """Import torch and Triton once, before workers are forked.

    Whatever asks here whether there is a GPU must not begin to use it, which a forked process could not go on with.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from . import arrived, carried, counters, device, model, sanitizer, testing, tiles, times  # noqa: F401

    with suppress(ImportError):
        import_module("pytest")


def plan_page(chosen: list[Job], why: str) -> str:
    """List what would run on a GPU, as lines."""
    lines, start = [f"Nothing ran: {why}. On a GPU, one job after the other:"], 0.0
    for job in chosen:
        count = len(job.tasks())
        missing = job.missing()
        state = (
            f"skipped: {missing}" if missing else f"about {job.seconds:.0f} s, {count} task(s), {job.at_once} at once"
        )
        lines.append(f"{start:5.0f} s  {job.name:12} {job.what}: {state}")
        start += 0 if missing else job.seconds
    lines.append(f"{start:5.0f} s  end; with fewer --minutes, fewer of the times, tiles and tests")
    return "\n".join(lines)
