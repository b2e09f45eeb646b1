"""What a GPU is asked first, as far as a CPU goes: the jobs, their rows, the verdict, what tuning tries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from rotor.bench import gpu
from rotor.bench.precompile import named_layouts
from rotor.errors import UsageError
from rotor.kernels.defaults import default_layer


def settings(tmp_path: Path, **changes) -> gpu.GpuSettings:
    return gpu.GpuSettings(**{"out": tmp_path / "gpu.jsonl", "dry": True, **changes})


def test_joint_latents_come_first_and_every_layout_is_measured(tmp_path) -> None:
    whole = list(gpu.jobs(settings(tmp_path, dry=False)))
    assert [job.part for job in whole] == sorted((job.part for job in whole), key=gpu.PARTS.index)
    assert whole[0].name == "test_gpu.py"
    measured = [job.name for job in whole if job.part == "measure"]
    assert measured == [*named_layouts(), gpu.FULL]
    assert measured[0].startswith("joint")
    watched = [job for job in whole if job.part == "sanitizer"]
    assert {job.name.split()[0] for job in watched} == {"memcheck", "racecheck"}
    assert ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1") in watched[0].environment


def test_nonsense_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="--parts: 'decode' is none of tests, sanitizer, measure"):
        settings(tmp_path, parts=("decode",)).check()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Give another file"):
        settings(tmp_path, out=tmp_path / "file" / "gpu.jsonl").check()
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="there is no CUDA device here"):
            settings(tmp_path, dry=False).check()


def job(code: str, limit_s: float = 60, part: str = "measure") -> gpu.Job:
    return gpu.Job(part, "a row", (sys.executable, "-c", code), limit_s)


def test_a_process_that_fails_or_hangs_is_one_red_row(tmp_path, monkeypatch) -> None:
    good = json.dumps({"name": "x, decode 1 x 2, kernel", "status": "ok"})
    jobs = [
        job(f"print({good!r}); print({good!r}); raise SystemExit('broke')"),
        job("import time; time.sleep(60)", limit_s=0.5),
        job("raise SystemExit(5)", part="tests"),
        gpu.Job("sanitizer", "memcheck", ("no-such-tool",), 60),
        job("pass"),
    ]
    monkeypatch.setattr(gpu, "jobs", lambda settings: iter(jobs))
    told: list[str] = []
    rows = gpu.run(settings(tmp_path), told.append)
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "failed", "skipped", "skipped", "ok"]
    assert rows[2]["why"] == "broke"
    assert rows[3]["why"] == "took longer than 0 s"
    assert rows[5]["why"] == "no-such-tool is not installed"
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == rows
    assert len(told) == len(rows)


def test_no_time_left_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "jobs", lambda settings: iter([job("pass")]))
    assert [row["status"] for row in gpu.run(settings(tmp_path, minutes=0.0), lambda text: None)] == ["skipped"]


def test_tuning_tries_no_tile_above_a_block() -> None:
    layout = named_layouts()["joint-64-fast"]
    own = default_layer(layout)
    tried = list(gpu._candidates(own, layout, "sm_90", dry=False))
    assert {kernels.sm_90.keys for kernels in tried} == {16, 32, 64}
    assert tried[-1].materialise
    assert len(set(tried)) == len(tried)
    assert all(kernels.sm_80 == own.sm_80 for kernels in tried)
