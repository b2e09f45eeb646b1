"""Hardware counters of the kernels of a decode step, by NVIDIA's `ncu`, which runs this module as a program."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from .loads import LOADS
from .plan import ROOT, Record

KERNELS = ("append", "absorb", "decode", "join")

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables",
    "SchedulerStats", "WarpStateStats", "InstructionStats", "LaunchStats", "Occupancy",
)  # fmt: skip

KEPT = {
    "instructions": r"(sm|smsp)__inst_executed\.sum",
    "instructions_per_cycle": r"sm__inst_executed\.avg\.per_cycle_(active|elapsed)",
    "cycles": r"sm__cycles_(active\.avg|elapsed\.(max|avg))|gpc__cycles_elapsed\.max",
    "duration_ns": r"gpu__time_duration\.sum",
    "pipes": r"sm__(inst_executed_pipe|pipe)_\w+\.(avg|sum)\.pct_of_peak_sustained_active|idc__requests\S+pct\S+",
    "shared": r"l1tex__data_pipe_lsu_wavefronts\S*|l1tex__data_bank_\S*|smsp__inst_executed_op_(shared|ldsm)\S*",
    "dram": r"dram__(bytes\S*|throughput\S*)|gpu__dram_throughput\S*",
    "l2": r"lts__t_sector_hit_rate\S*|lts__throughput\S*",
    "stalls": r"smsp__average_warps_issue_stalled_\w+_per_issue_active\.ratio",
    "occupancy": r"sm__(warps_active\.avg\.(pct_of_peak_sustained_active|per_cycle_active)|maximum_warps\S*)",
    "launch": r"launch__(registers_per_thread|shared_mem_per_block\S*|occupancy_limit_\w+|grid_size|block_size)",
}  # fmt: skip
"""Patterns of the ncu metrics that records keep, by kind."""


def count(names: list[str], raw: str, load: str = "8 x 32K") -> Iterator[Record]:
    """Counters of every kernel of a step of some subjects; all that ncu says is written to `raw`."""
    profiled = [sys.executable, "-m", __name__, load, *names]
    call = [
        "ncu",
        "--clock-control",
        "none",
        "--target-processes",
        "all",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
    ]
    call += ["--kernel-name", f"regex:^({'|'.join(KERNELS)})_kernel$"]
    call += [word for section in SECTIONS for word in ("--section", section)]
    done = subprocess.run([*call, *profiled], capture_output=True, text=True, cwd=ROOT)
    text = done.stdout
    Path(raw).write_text(text, "utf-8")
    found = [*parse(text)]
    if not found:
        raise RuntimeError(f"ncu, exit code {done.returncode}: {(text + done.stderr)[-3000:]}")
    seen = -1
    for record in found:
        seen += record["kernel"] == "append_kernel"  # a step begins with it
        name = names[seen] if 0 <= seen < len(names) else ""
        yield {"layout": name, "load": load, **record}


def parse(text: str) -> Iterator[Record]:
    """The rows of ncu's table, behind what the profiled program and ncu print."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return
    for row in csv.DictReader(lines[start:]):
        if not (row.get("Kernel Name") or "").strip():  # the row of units
            continue
        counters: dict[str, dict[str, float]] = {}
        for metric, value in row.items():
            kind = next((kind for kind, pattern in KEPT.items() if re.fullmatch(pattern, metric or "")), None)
            if kind is not None and (number := _number(value)) is not None:
                counters.setdefault(kind, {})[metric] = number
        yield {"kernel": row["Kernel Name"].partition("(")[0].strip(), "counters": counters}


def _number(text: str) -> float | None:
    try:
        return float(str(text).replace(",", ""))
    except ValueError:
        return None


def step(load: str, names: list[str], device: str = "cuda", lengths: list[int] | None = None) -> None:
    """A step of each subject, launched once: what ncu looks at."""
    from rotor.tools.bench.attention import kernel

    from .subjects import gpu_subjects
    from .times import appending, contiguous

    where = torch.device(device)
    with torch.inference_mode():
        for name in names:
            subject = gpu_subjects()[name]
            problems = contiguous(subject, lengths or LOADS[load], 1, where)
            appending(subject, problems, where)[0]()
            kernel(problems[0], subject.kernels)()
            if where.type == "cuda":
                torch.cuda.synchronize()


if __name__ == "__main__":
    step(sys.argv[1], sys.argv[2:])
