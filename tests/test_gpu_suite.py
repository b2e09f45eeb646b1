"""`rotor gpu` without a GPU: phases that crash, hang and go on, what is measured again, the verdict, the dry path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from typer.testing import CliRunner

from rotor.bench.gpu.case import Case, Refused, Skipped, run_cases
from rotor.bench.gpu.phases import NAMES, PHASES, Phase
from rotor.bench.gpu.records import Setting, append, cut_off_the_last, read, rows_done, unfinished
from rotor.bench.gpu.runner import GpuSettings, run_phases
from rotor.bench.gpu.verdict import judge
from rotor.cli.commands import app
from rotor.errors import NumericsError, UsageError

CHILD = """\
import json, os, sys, time
phase, out, run = sys.argv[1:]
if phase == "silent":
    sys.exit(3)
lines = [json.loads(line) for line in open(out)]
done = {r["row"] for r in lines if r["phase"] == phase
        and (r["status"] == "ok" or (r["status"] != "begun" and r["run"] == run))}
def write(row, status):
    about = {"phase": phase, "row": row, "run": run, "device": "toy", "commit": "c0ffee", "dry": False}
    with open(out, "a") as file:
        file.write(json.dumps({**about, "status": status, "pid": os.getpid()}) + "\\n")
for row in ("a", "b", "c"):
    if row in done:
        continue
    write(row, "begun")
    if row == "b" and phase == "crash":
        os.abort()
    if row == "b" and phase == "hang":
        time.sleep(600)
    if row == "b" and phase == "torn":
        open(out, "a").write('{"phase": "to')
        sys.exit(1)
    status = "failed" if row == "b" and phase == "broken" else "ok"
    write(row, status)
    if status == "failed":
        sys.exit(75)
"""
"""A process that measures toys, without what takes long to import."""


@pytest.fixture
def started(tmp_path: Path):
    """started(phase, ...) -> what each row of a run of these toy phases came to, and all records."""
    child, out = tmp_path / "child.py", tmp_path / "gpu.jsonl"
    child.write_text(CHILD)

    def run(*names: str, limits_s: tuple[float, ...] = (), row_limit_s: float = 300.0, minutes: float = 10.0):
        limits_s = limits_s or (60.0 * minutes,) * len(names)
        phases = [Phase(name, limit_s, row_limit_s, "") for name, limit_s in zip(names, limits_s, strict=True)]
        told: list[str] = []
        this = run_phases(
            GpuSettings(out, minutes, names),
            told.append,
            phases,
            lambda phase, run: [sys.executable, "-I", "-S", str(child), phase, str(out), run],
        )
        assert len(told) == len(names)
        ended = [r for r in read(out) if r.get("run") == this and r["status"] != "begun"]
        return {f"{r['phase']} {r['row']}": r["status"] for r in ended}

    run.out = out  # type: ignore[attr-defined]
    return run


@pytest.fixture(autouse=True)
def of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_crash_a_torn_line_and_a_broken_context_are_one_red_row_each(started) -> None:
    for name in ("crash", "torn", "broken"):
        found = started(name)
        assert found == {f"{name} a": "ok", f"{name} b": "failed", f"{name} c": "ok"}
    pids = [r["pid"] for r in read(started.out) if r["phase"] == "broken" and r["status"] == "ok"]
    assert len(set(pids)) == 2  # another process went on
    whys = [r["why"] for r in read(started.out) if r["status"] == "failed" and "why" in r]
    assert whys == ["the process ended with -6", "the process ended with 1"]


def test_a_row_that_hangs_is_red_and_a_phase_that_is_too_long_leaves_the_rest_to_another_run(started) -> None:
    assert started("hang", row_limit_s=1.0) == {"hang a": "ok", "hang b": "failed", "hang c": "ok"}
    found = started("hang", "good", limits_s=(6.0, 594.0))
    assert {row: found[row] for row in found if row.startswith("good")} == dict.fromkeys(
        ("good a", "good b", "good c"), "ok"
    )
    assert [status for row, status in found.items() if row.startswith("hang")] == ["skipped"]


def test_a_process_that_dies_before_its_first_row_is_one_red_row(started) -> None:
    assert started("silent", "good") == {
        "silent the whole phase": "failed",
        "good a": "ok",
        "good b": "ok",
        "good c": "ok",
    }
    (red,) = judge(read(started.out))["failed"]
    assert red["why"] == "the process ended with 3; what it said is in gpu.log"
    assert started("good") == {}  # all of it was measured before
    assert judge(read(started.out))["failed"] == []  # and what had no rows is another run's


def test_without_time_nothing_is_begun(started) -> None:
    assert started("good", minutes=0.01) == {"good the whole phase": "skipped"}


def cases(calls: list[str], **rows: Any) -> list[Case]:
    def run(name: str) -> dict[str, Any]:
        calls.append(name)
        if isinstance(rows[name], Exception):
            raise rows[name]
        return {"value": rows[name]}

    return [Case(name, lambda name=name: run(name), {"of": name}) for name in rows]  # type: ignore[misc]


def test_what_is_measured_is_not_measured_again_and_what_failed_is_by_another_run(tmp_path: Path) -> None:
    out, calls = tmp_path / "gpu.jsonl", []
    rows = {
        "good": 1,
        "refused": Refused("no such\n inputs"),
        "skipped": Skipped("not installed"),
        "wrong": NumericsError("off by 3", "look"),
        "defect": ZeroDivisionError("0"),
        "memory": torch.OutOfMemoryError("32 GB"),
    }
    first = Setting("1", "toy", "c0ffee", False)
    run_cases("p", cases(calls, **rows), out, first)
    assert calls == list(rows)
    ended = [r for r in read(out) if r["status"] != "begun"]
    assert [r["status"] for r in ended] == ["ok", "refused", "skipped", "failed", "failed", "refused"]
    assert (ended[0]["value"], ended[0]["of"]) == (1, "good")
    assert [r.get("why") for r in ended[1:]] == [
        "no such inputs", "not installed", "off by 3", "ZeroDivisionError: 0", "32 GB",
    ]  # fmt: skip
    again = {
        "1": [],
        "2": ["skipped", "wrong", "defect"],
    }
    for run, expected in again.items():
        calls.clear()
        run_cases("p", cases(calls, **rows), out, Setting(run, "toy", "c0ffee", False))
        assert calls == expected
    for other in (Setting("3", "other", "c0ffee", False), Setting("3", "toy", "c0ffee", True)):
        assert rows_done(read(out), other, "p") == set()
    assert rows_done(read(out), first, "q") == set()


def test_records_survive_a_line_that_was_cut_off_and_nothing_else_is_taken_for_them(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    append(out, {"phase": "p", "row": "a", "status": "begun", "run": "1"})
    with out.open("a") as file:
        file.write('{"phase": "p", "ro')
    assert len(read(out)) == 1
    assert unfinished(read(out), "1", "p") == read(out)[0]
    assert unfinished(read(out), "2", "p") is None
    cut_off_the_last(out)
    append(out, {"phase": "p", "row": "a", "status": "ok", "run": "1"})
    assert [r["status"] for r in read(out)] == ["begun", "ok"]
    assert unfinished(read(out), "1", "p") is None
    out.write_text("hello\nworld\n")
    with pytest.raises(UsageError, match=r"line 1 is no result of rotor gpu"):
        read(out)


def record(phase: str, row: str, seconds: float | None = None, **more: Any) -> dict[str, Any]:
    about = {"phase": phase, "row": row, "run": "1", "device": "toy", "commit": "c0ffee", "dry": False, "status": "ok"}
    return about | ({} if seconds is None else {"seconds": {"median": seconds}}) | more


def test_the_verdict_of_measured_rows(tmp_path: Path) -> None:
    rates = {"copy_bytes_per_s": 1e12, "bfloat16_flops_per_s": 1e14, "matmul_flops_per_s": 1e14}
    half = {"batch_size": 8, "bytes": 5e8, "flops": 1e9}
    records = [
        record("device", "rates", rates=rates, about={"name": "toy", "type": "cuda"}),
        record("tests", "pytest a"),
        record("tests", "pytest b", status="failed", why="2 of 9"),
        record("decode", "rotor, after RoPE, 8 x 1", 0.58e-3, layout="after RoPE", **half),
        record("decode", "rotor, before RoPE, 8 x 1", 1e-3, layout="before RoPE", **half),
        record("decode", "rotor, full, 8 x 1", 1.2e-3, layout="full", **half | {"bytes": 1e9}),
        record("decode", "SDPA flash, full, 8 x 1", 1.1e-3, layout="full", **half | {"bytes": 1e9}),
        record("prefill", "rotor, after RoPE, 1 x 8", 1.0, layout="after RoPE", batch_size=1, flops_per_s=6e13),
        record("prefill", "SDPA flash, full, 1 x 8", 1.0, layout="full", batch_size=1, flops_per_s=8e13),
        record("model", "8B, full, eager", 20e-3, layout="full", batch_size=1),
        record("model", "8B, full, graph", 12e-3, layout="full", batch_size=1),
        record("model", "8B, after RoPE, graph", 8e-3, layout="after RoPE", batch_size=1),
        record("decode", "another device's", 1e-9, device="other", layout="full", **half),
    ]
    records = [*records[-1:], *records[:-1]]
    verdict = judge(records)
    assert (verdict["device"]["name"], verdict["rates"], verdict["commit"]) == ("toy", rates, "c0ffee")
    found = {goal["name"]: (goal["got"], goal["met"]) for goal in verdict["goals"]}
    assert found["every test of the GPU passes"] == ("1 of 2 rows red", False)
    assert found["no error by NVIDIA's sanitizer"] == ("", None)
    assert found["decode, after RoPE, batch 8: share of the floor"] == ("86.2%", True)  # 0.5 ms of 0.58
    assert found["decode, before RoPE, batch 8: share of the floor"] == ("50.0%", False)
    assert found["decode, after RoPE, batch 1: share of the floor"] == ("", None)
    speed_up = "speed-up over the fastest uncompressed"
    assert found[f"decode, after RoPE, batch 8: {speed_up}"] == ("1.90 (SDPA flash)", True)  # of 0.9 times 2
    assert found[f"decode, before RoPE, batch 8: {speed_up}"] == ("1.10 (SDPA flash)", True)
    assert found["prefill, after RoPE: share of SDPA's FLOP rate"] == ("75.0%", True)
    assert found["8B, after RoPE, batch 1: time between tokens over the uncompressed"] == ("0.67", True)
    assert verdict["failed"] == [{"phase": "tests", "row": "pytest b", "why": "2 of 9"}]
    assert verdict["rows"] == {"ok": 11, "failed": 1}
    dry = judge([r | {"dry": True} for r in records])
    assert {goal["met"] for goal in dry["goals"]} == {None}


def test_the_phases_fill_forty_minutes() -> None:
    assert sum(phase.limit_s for phase in PHASES) == 40 * 60
    assert [phase.name for phase in PHASES][:2] == ["device", "tests"]


IN_ONE = ("device", "decode", "sweep", "queries", "prefill", "model")


def test_every_row_is_measured_dry(tmp_path: Path) -> None:
    """In one process, as the interpreter and PyTorch take longest to import."""
    pytest.importorskip("triton", reason="triton is not installed")
    out = tmp_path / "dry.jsonl"
    call = [sys.executable, "-m", "rotor.bench.gpu", *IN_ONE, "--out", str(out), "--dry"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = [r for r in read(out) if r["status"] != "begun"]
    assert {r["phase"] for r in ended} == set(IN_ONE)
    red = [r for r in ended if r["status"] == "failed"]
    assert red == []
    left_out = {r["row"].partition(",")[0] for r in ended if r["status"] != "ok"}
    assert left_out == {"SDPA cudnn", "FlashInfer"}
    measured = [r for r in ended if r["status"] == "ok" and r["phase"] not in ("device", "model")]
    assert {r["new_tokens"] for r in measured} == {1, 4, 16}
    assert all(r["error"] <= r["limit"] and r["seconds"]["median"] > 0 and r["dry"] for r in measured)
    assert {r["mode"] for r in ended if r["phase"] == "model"} == {"eager", "graph", "compiled"}
    assert all("rates" not in r for r in ended)  # of a dry run no number is claimed


@pytest.mark.slow
def test_the_whole_command_dry(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "rotor", "gpu", "--dry", "-o", "dry.jsonl", "--minutes", "20", "--json"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict == json.loads((tmp_path / "dry.json").read_text())
    assert verdict["dry"]
    assert {r["phase"] for r in read(tmp_path / "dry.jsonl")} == {"run", *NAMES}


def test_the_command_asks_for_a_gpu_and_for_phases_that_there_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, text in (
        ([], "there is no CUDA device here"),
        (["--phases", "tests,decod"], "'decod' is none of device, tests"),
        (["--checkpoint", str(tmp_path / "none")], "no such folder"),
    ):
        with pytest.raises(Exception, match=text):
            CliRunner().invoke(app, ["gpu", "-o", str(tmp_path / "g.jsonl"), *words], catch_exceptions=False)


def test_the_command_prints_the_verdict_and_its_exit_code_is_that_of_red_rows(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "g.jsonl"

    def measured(settings: GpuSettings, told: Any) -> str:
        append(out, record("decode", "rotor, full", 1.0, dry=True, status=status))
        return "1"

    monkeypatch.setattr("rotor.bench.gpu.runner.run_phases", measured)
    for status, code in (("ok", 0), ("failed", 1)):
        done = CliRunner().invoke(app, ["gpu", "--dry", "-o", str(out)])
        assert done.exit_code == code
        assert "a dry run: nothing is claimed" in done.output
        assert ("red: decode, rotor, full" in done.output) == bool(code)
        assert json.loads((tmp_path / "g.json").read_text())["rows"] == {status: 1}
