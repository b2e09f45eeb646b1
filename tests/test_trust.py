"""An output folder is whole or absent, sources stay as they were, and equal requests give equal bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, calibrated
from test_cli import rotor
from test_end_to_end import contents
from transformers import AutoModelForCausalLM

from rotor.errors import RotorError, UsageError
from rotor.export import export
from rotor.integrity import Validation, check_integrity
from rotor.progress import Progress
from rotor.run import Run

MOMENTS = """
import os, random, resource, signal, sys, time
from pathlib import Path
import rotor

sys.modules["rotor.export"].write_with_checkpoint = lambda *arguments: None
run, out, first, last = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def child(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def export(moment=None):
    def work():
        if moment is not None:
            signal.setitimer(signal.ITIMER_REAL, moment)  # SIGALRM, which nothing catches, ends the process at once
        rotor.export(run, out, compression=0.4, overwrite=True)
    return child(work)

start = time.perf_counter()
assert export() == 0
whole = time.perf_counter() - start
for number in range(first, last):
    moment = whole * random.Random(number).uniform(0.05, 1.0)
    ended = export(moment)
    print(ended, flush=True)
    sys.stdin.readline()
"""
"""Exports in forked processes that a timer kills, from a process that has imported rotor; waits while each is judged.

Without the report, so that the moments fall on what has to be whole."""


@pytest.fixture(scope="module")
def sharded(tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on a tiny model of several shards, whose table has the point that is exported."""
    folder = tmp_path_factory.mktemp("trust")
    AutoModelForCausalLM.from_pretrained(tiny("llama")).save_pretrained(folder / "model", max_shard_size="300KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny("llama") / name, folder / "model" / name)
    run = calibrated(folder / "model", folder / "run", "post", 1)
    export(run.folder, folder / "out", compression=0.4)
    return run


def sound(folder: Path) -> bool:
    result = Validation(folder)
    check_integrity(result, Progress())
    return not result.damaged


def killed(run: Run, out: Path, first: int, last: int) -> list[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", MOMENTS, str(run.folder), str(out), str(first), str(last)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ends = []
    expected: dict[str, str] = {}
    for _ in range(first, last):
        ends.append(int(process.stdout.readline()))
        if out.exists():  # the old folder or the new one, which are equal
            assert contents(out) == (expected := expected or contents(out))
            assert sound(out)
        if random.Random(len(ends)).random() < 0.5:
            shutil.rmtree(out, ignore_errors=True)
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait() == 0
    return ends


def test_killed_at_random_moments(sharded: Run, tmp_path: Path) -> None:
    ends = killed(sharded, tmp_path / "out", 0, 8)
    assert set(ends) <= {0, -signal.SIGALRM}
    assert -signal.SIGALRM in ends


@pytest.mark.slow
def test_killed_at_more_random_moments(sharded: Run, tmp_path: Path) -> None:
    ends = killed(sharded, tmp_path / "out", 8, 50)
    assert set(ends) <= {0, -signal.SIGALRM}
    assert ends.count(-signal.SIGALRM) >= 20


def test_a_disk_that_fills_up_at_any_shard(sharded: Run, tmp_path: Path, monkeypatch) -> None:
    """OUT is absent, or the old one as it was; nothing else is left."""
    module = sys.modules["rotor.export"]
    write = module.write_shard
    shards = sorted(p.name for p in sharded.model_folder.glob("*.safetensors"))
    assert len(shards) >= 2

    def full_at(name: str):
        def writing(path: Path, tensors) -> None:
            write(path, tensors)
            if path.name == name:
                os.truncate(path, path.stat().st_size // 2)
                raise OSError(28, "No space left on device")

        return writing

    old = tmp_path / "old"
    export(sharded.folder, old, compression=0.3)
    before = contents(old)
    for name in shards:
        monkeypatch.setattr(module, "write_shard", full_at(name))
        with pytest.raises(RotorError, match="No space left on device"):
            export(sharded.folder, tmp_path / "new", compression=0.4)
        with pytest.raises(RotorError, match="No space left on device"):
            export(sharded.folder, old, compression=0.4, overwrite=True)
        assert contents(old) == before
        assert {p.name for p in tmp_path.iterdir()} == {"old"}


def test_a_limit_on_the_size_of_files(sharded: Run, tmp_path: Path) -> None:
    """The system itself refuses to write on, at every size of file that an export writes."""
    program = """
import resource, signal, sys
import rotor
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in map(int, sys.argv[3:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        rotor.export(sys.argv[1], sys.argv[2], compression=0.4)
        print("written")
    except (rotor.RotorError, OSError) as error:
        print(type(error).__name__)
"""
    sizes = sorted({p.stat().st_size for p in (sharded.folder.parent / "out").glob("*.safetensors")})
    limits = [str(size - 1) for size in sizes]
    assert len(limits) >= 2
    done = subprocess.run(
        [sys.executable, "-c", program, str(sharded.folder), str(tmp_path / "out"), *limits],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CheckpointError"] * len(limits)
    assert list(tmp_path.iterdir()) == []


def test_sources_are_untouched_and_never_written_to(tiny, tmp_path: Path, capsys) -> None:
    """Also through links, to the folder and to its files."""
    real = shutil.copytree(tiny("llama"), tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    files = tmp_path / "files"
    files.mkdir()
    for path in real.iterdir():
        (files / path.name).symlink_to(path)
    before = contents(real)
    times = {path: path.stat().st_mtime_ns for path in [real, *real.iterdir()]}
    for model in (tmp_path / "link", files):
        run = calibrated(model, tmp_path / f"run-{model.name}", "post", 1).folder
        kept = {name: digest for name, digest in contents(run).items() if "safetensors" in name}
        export(run, tmp_path / f"out-{model.name}", compression=0.4)
        assert kept.items() <= contents(run).items()
        assert (tmp_path / f"out-{model.name}" / "tokenizer.json").read_bytes() == (
            real / "tokenizer.json"
        ).read_bytes()
        (tmp_path / "run-alias").symlink_to(run)
        places = [model, model / "x", real, run, tmp_path / "run-alias", tmp_path / "run-alias" / "x", tmp_path]
        for place in places:
            with pytest.raises(UsageError, match="which rotor reads from"):
                export(run, place, compression=0.4, overwrite=True)
        code, _, error = rotor(capsys, "calibrate", model, "-o", real, "--overwrite")
        assert (code, "which rotor reads from" in error) == (2, True)
        (tmp_path / "run-alias").unlink()
    assert contents(real) == before
    assert times == {path: path.stat().st_mtime_ns for path in [real, *real.iterdir()]}


def test_equal_requests_give_equal_bytes_with_any_hash_seed_and_number_of_threads(tmp_path: Path) -> None:
    """One thread or two, one hash seed or another: float sums are split differently, yet ranks stay the same."""
    program = """
import sys
from conftest import DEMO_MODEL, calibrated
import rotor
rotor.export(calibrated(DEMO_MODEL, sys.argv[1] + "/run", "post", 1).folder, sys.argv[1] + "/out", compression=0.5)
"""
    found = []
    for index, (seed, threads) in enumerate((("0", "1"), ("7", "1"), ("7", "2"))):
        folder = tmp_path / str(index)
        subprocess.run(
            [sys.executable, "-c", program, str(folder)],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
                "PYTHONHASHSEED": seed,
                "OMP_NUM_THREADS": threads,
            },
            check=True,
            capture_output=True,
        )
        weights = {name: digest for name, digest in contents(folder).items() if name.endswith(".safetensors")}
        found.append(
            (weights, contents(folder / "out"), json.loads((folder / "out" / "rotor.json").read_text())["ranks"])
        )
    assert found[0][:2] == found[1][:2]
    assert all(ranks["stored"] == found[0][2]["stored"] for _, _, ranks in found)
