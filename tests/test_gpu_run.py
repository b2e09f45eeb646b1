"""`python artifacts/gpu`: processes, budget, what it says without a GPU, and what it makes of what others print."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from gpu import arrived
from gpu import runner as module
from gpu.arguments import run_command
from gpu.counters import parse
from gpu.loads import FLASH_ROWS
from gpu.plan import CORES, Job, Task, jobs
from gpu.runner import Runner, find
from gpu.session import run
from gpu.summary import markdown
from support.paths import ROOT

from rotor.errors import NumericsError, UsageError

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")


def two(value: int):
    yield {"value": value}
    yield {"value": value + 1}


def raises():
    yield {"value": 0}
    raise ValueError("broken here")


def dies():
    yield {"value": 0}
    os._exit(7)


def hangs():
    yield {"value": 0}
    time.sleep(600)


def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *planned: Job, minutes: float = 1.0) -> list[dict]:
    monkeypatch.setattr(module, "find", lambda name: globals()[name])
    out = tmp_path / "out.jsonl"
    runner = Runner(out, {"commit": "abc"}, minutes, lambda line: None)
    records = runner.run(planned)
    assert [json.loads(line) for line in out.read_text().splitlines()] == records
    assert all(record["commit"] == "abc" for record in records)
    assert [r["job"] for r in records if "job_s" in r] == [job.name for job in planned if not job.missing()]
    return [record for record in records if "job_s" not in record]


@pytest.mark.nightly
def test_a_task_that_fails_dies_or_hangs_leaves_its_records_and_the_next_one(tmp_path, monkeypatch) -> None:
    tasks = [Task("a", "raises"), Task("b", "dies"), Task("c", "hangs", limit_s=1.0), Task("d", "two", {"value": 4})]
    records = ran(tmp_path, monkeypatch, Job("job", "", 10, lambda: tasks))
    assert [(r["task"], r.get("value", r.get("failed", "").strip().splitlines()[-1:])) for r in records] == [
        ("a", 0),
        ("a", ["ValueError: broken here"]),
        ("b", 0),
        ("b", ["the process ended with exit code 7"]),
        ("c", 0),
        ("c", ["out of time after 1 s"]),
        ("d", 4),
        ("d", 5),
    ]
    page = markdown(records)
    assert "failed: job, a: ValueError: broken here" in page


@pytest.mark.nightly
def test_several_at_once(tmp_path, monkeypatch) -> None:
    tasks = [Task(str(n), "two", {"value": n}) for n in range(4)]
    records = ran(tmp_path, monkeypatch, Job("job", "", 10, lambda: tasks, at_once=2))
    assert sorted(r["value"] for r in records) == sorted([*range(4), *range(1, 5)])


@pytest.mark.nightly
def test_what_there_is_no_time_or_no_program_for_is_said(tmp_path, monkeypatch) -> None:
    late = [Task("a", "hangs"), Task("b", "two", {"value": 1})]
    planned = [
        Job("absent", "", 5, lambda: late, missing=lambda: "ncu is not installed"),
        Job("slow", "", 600, lambda: late, flexible=True),
        Job("last", "", 5, lambda: [Task("c", "two", {"value": 8})]),
    ]
    records = ran(tmp_path, monkeypatch, *planned, minutes=0.2)
    said = {(r["job"], r["task"]): r.get("skipped", r.get("failed", "")) for r in records}
    assert said["absent", ""] == "ncu is not installed"
    assert said["slow", "a"].startswith("out of time")
    assert said["slow", "b"] == "no time was left"
    assert [r["value"] for r in records if r["job"] == "last"] == [8, 9]


def test_every_task_of_the_plan_is_a_function(tmp_path) -> None:
    for job in jobs(tmp_path / "out.jsonl"):
        for task in job.tasks():
            function = find(task.function)
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            assert set(task.arguments) <= set(names), task
    assert CORES >= 1


@needs_no_gpu
def test_without_a_gpu_it_says_what_would_run(tmp_path) -> None:
    out = tmp_path / "gpu.jsonl"
    with pytest.raises(UsageError, match="no CUDA device"):
        run_command(["-o", str(out)])
    session = run(out, 1.0, "", lambda line: None)
    assert not session.cuda
    for job in jobs(out):
        (line,) = [line for line in session.summary.splitlines() if f" s  {job.name} " in line]
        assert (f"skipped: {job.missing()}" if job.missing() else f"about {job.seconds:.0f} s") in line
    (record,) = map(json.loads, out.read_text().splitlines())
    assert (record["cuda"], record["job"]) == (False, "device")
    with pytest.raises(UsageError, match="--only x: no job"):
        run(out, 1.0, "", lambda line: None, ["x"])


def test_rows_that_are_others_when_launches_hurry_are_an_error() -> None:
    launched = iter(range(100))
    steady, sometimes = (lambda: torch.zeros(2)), (lambda: torch.full((2,), float(next(launched) == 3)))
    (record,) = arrived.compared("layout", [steady, steady], 10)
    assert (record["launches"], record["different"]) == (10, 0)
    found = arrived.compared("layout", [steady, sometimes], 10)
    assert next(found)["different"] == 1
    with pytest.raises(NumericsError, match="1 of 10 launches wrote other rows"):
        next(found)


def test_the_plan_begins_with_what_other_results_go_by(tmp_path) -> None:
    names = [job.name for job in jobs(tmp_path / "out.jsonl")]
    assert names[:7] == ["device", "arrivals", "compile", "correctness", "cuda", "times", "tests"]
    (arrivals,) = (job for job in jobs(tmp_path / "out.jsonl") if job.name == "arrivals")
    assert arrivals.tasks()[-1].name == "hurried"


def test_ratios_are_to_the_fastest_at_16_bits_and_to_fp8() -> None:
    rows = [("SDPA flash", 60), ("SDPA cuDNN", 40), (FLASH_ROWS[16], 50), (FLASH_ROWS[8], 25), (FLASH_ROWS[4], 10)]
    about = {"job": "times", "load": "8 x 32K"}
    records = [
        {**about, "layout": "llama3-8b, uncompressed", "row": row, "seconds": {"median": 1e-6 * us}} for row, us in rows
    ]
    records.append({**about, "layout": "llama3-8b-128x2", "row": "rotor", "seconds": {"median": 20e-6}})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(records).splitlines() if "|" in line]
    (titles,) = (line for line in lines if "over fp8" in line)
    found = {line[titles.index("row")]: line for line in lines}
    at_16, fp8 = titles.index("over the fastest at 16 bits"), titles.index("over fp8")
    assert (found["rotor"][at_16], found["rotor"][fp8]) == ("0.50", "0.80")
    assert (found[FLASH_ROWS[8]][at_16], found[FLASH_ROWS[16]][fp8]) == ("0.62", "2.00")


METRICS = {
    "gpu__time_duration.sum": ("ns", "12,345"),
    "sm__inst_executed.sum": ("inst", "1000"),
    "sm__inst_executed.avg.per_cycle_active": ("inst/cycle", "1.51"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "0.7"),
    "sm__unheard_of": ("", "n/a"),
}


def _row(*cells: str) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


NCU = "\n".join([
    "==PROF== Connected to process 12",
    "step 1",
    _row("ID", "Kernel Name", *METRICS),
    _row("", "", *(unit for unit, _ in METRICS.values())),
    _row("0", "decode_kernel(void *)", *(value for _, value in METRICS.values())),
])  # fmt: skip


def test_counters_of_ncu() -> None:
    (record,) = parse(NCU)
    assert record["kernel"] == "decode_kernel"
    assert record["counters"] == {
        "duration_ns": {"gpu__time_duration.sum": 12345.0},
        "instructions": {"sm__inst_executed.sum": 1000.0},
        "instructions_per_cycle": {"sm__inst_executed.avg.per_cycle_active": 1.51},
        "stalls": {"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": 0.7},
    }
    assert [*parse("==ERROR== no counters")] == []


BUNDLED = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions")


@pytest.mark.nightly
@needs_no_gpu
def test_it_starts_from_a_bare_copy_with_the_bundle_on_the_path(tmp_path: Path) -> None:
    """Uninstalled, by a Python that has no pydantic: what `make gpu-bundle` says to carry is enough."""
    for folder in ("rotor", "kernels", "recipes", "artifacts/gpu"):
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("installed", "bundle"):
        (tmp_path / name).mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        package = path.name.split("-")[0].removesuffix(".py")
        if not package.startswith(("rotor", "__editable__", "_rotor")):
            (tmp_path / ("bundle" if package in BUNDLED else "installed") / path.name).symlink_to(path)

    def start(*folders: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(str(tmp_path / name) for name in folders)
        program = [sys.executable, "-S", "artifacts/gpu", "-o", str(tmp_path / "gpu.jsonl"), "--minutes", "1"]
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(program, cwd=tmp_path / "tree", env=environment, capture_output=True, text=True)

    bare = start("installed")
    assert bare.returncode != 0
    assert "pydantic" in bare.stderr
    done = start("bundle", "installed")
    assert done.returncode == 2, done.stderr
    assert "Nothing ran: there is no CUDA device here." in done.stdout + done.stderr
