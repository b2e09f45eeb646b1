"""An output folder is whole or absent, sources stay as they were, and equal requests give equal bytes."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.command_line import rotor
from support.paths import DEMO_MODEL, ROOT
from support.runs import SHORT_TEXT, calibrated, contents
from transformers import AutoModelForCausalLM

from rotor import Progress, RotorError, Run, Validation, calibrate, export, validate
from rotor.errors import CheckpointError, UsageError
from rotor.tools.validation.integrity import check_integrity

pytestmark = pytest.mark.nightly

EXPORTS = """
import importlib, os, signal, sys
import rotor
from rotor.checkpoint import publishing

module = importlib.import_module("rotor.search.export.export")
module.write_with_checkpoint = lambda *arguments: None
run, out = sys.argv[1:]
steps = 0

def counted(function, fatal):
    def wrapper(*arguments, **keywords):
        global steps
        steps += 1
        if steps == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)
    return wrapper

def killed_before(step):
    # Every step that changes the disk: the shards, JSON files, copies, flushes, renames.
    for place, name in (
        (module, "write_tensors"),
        (module, "write_json"),
        (module.shutil, "copyfile"),
        (publishing, "sync"),
        (os, "rename"),
    ):
        setattr(place, name, counted(getattr(place, name), step))

def export(step):
    pid = os.fork()
    if not pid:
        try:
            killed_before(step)
            rotor.export(run, out, compression=0.4, overwrite=True)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

rotor.export(run, out, compression=0.4, overwrite=True)  # what this imports, no process below has to
print("ready", flush=True)
for line in sys.stdin:
    print(export(int(line)), flush=True)
"""
"""Exports in forked processes, from one that has imported rotor; each is killed at a step.

Without the report, so that the moments fall on what has to be whole."""


@contextmanager
def exports(run: Run, out: Path) -> Iterator[Callable[[int], int]]:
    """`EXPORTS`: the function that this yields kills one before a step, and returns how it ended."""
    command = [sys.executable, "-c", EXPORTS, str(run.folder), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    ) as process:
        said, told = process.stdout, process.stdin
        assert said is not None
        assert told is not None
        assert said.readline().strip() == "ready"

        def killed(step: int) -> int:
            told.write(f"{step}\n")
            return int(said.readline())

        yield killed
    assert process.returncode == 0


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


def test_killed_at_every_boundary_of_an_export(sharded: Run, tmp_path: Path) -> None:
    """SIGKILL before each write, flush and rename: OUT is absent or whole, and the next export cleans up."""
    out = tmp_path / "out"
    present = []
    with exports(sharded, out) as killed:
        expected = contents(out)
        for step in range(1, 100):
            shutil.rmtree(out, ignore_errors=True)
            ended = killed(step)
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
            present.append(out.exists())
            if out.exists():
                assert contents(out) == expected
        assert len(present) >= 15
        assert present[0] is False
        there = []
        for step in range(len(present) - 1, len(present) + 4):  # the renames again, with a folder that is replaced
            ended = killed(step)
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
            there.append(out.exists())
            assert killed(2) == -signal.SIGKILL  # the first may put back what was renamed
            assert contents(out) == expected
        assert there[:3] == [True, False, True]
        assert killed(0) == 0
    assert sound(out)
    assert contents(out) == expected
    # What killed processes left beside it is gone after the export that finished.
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_a_disk_that_fills_up_at_any_shard(sharded: Run, tmp_path: Path, monkeypatch) -> None:
    """OUT is absent, or the old one as it was; nothing else is left."""
    module = importlib.import_module("rotor.search.export.export")
    write = module.write_tensors
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
        monkeypatch.setattr(module, "write_tensors", full_at(name))
        with pytest.raises(RotorError, match="No space left on device"):
            export(sharded.folder, tmp_path / "new", compression=0.4)
        with pytest.raises(RotorError, match="No space left on device"):
            export(sharded.folder, old, compression=0.4, overwrite=True)
        assert contents(old) == before
        assert {p.name for p in tmp_path.iterdir()} == {"old"}


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


def test_a_source_that_changed_since_calibration_is_noticed(tiny, tmp_path: Path) -> None:
    """Not only its weights: config.json and the tokenizer decide what they mean."""
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    run = calibrated(model, tmp_path / "run", "post", 1)
    export(run.folder, tmp_path / "out", compression=0.4)
    assert run.info["model"]["files"].keys() == {path.name for path in model.iterdir()} - {"model.safetensors"}

    def said() -> tuple[str, str]:
        (check,) = (c for c in validate(tmp_path / "out").checks if c.name == "source unchanged")
        return check.status, check.detail

    assert said()[0] == "pass"
    for name in ("config.json", "tokenizer_config.json"):
        path = model / name
        original = path.read_bytes()
        path.write_bytes(original + b"\n")
        assert said() == ("fail", f"{path} changed since calibration")
        with pytest.raises(CheckpointError, match=f"{name}: changed since calibration"):
            export(run.folder, tmp_path / "other", compression=0.4)
        path.unlink() if name != "config.json" else path.write_bytes(original)
    assert said() == ("fail", f"{model / 'tokenizer_config.json'} is gone")
    assert not (tmp_path / "other").exists()


def calibrated_and_exported(folder: Path) -> dict[str, str]:
    """As `rotor` does it, text of its own and probes included: hashes of the files of the run and of the checkpoint."""
    run = calibrate(
        DEMO_MODEL,
        folder / "run",
        "rotor",
        ["tokens.count=512", "tokens.seq_len=64", "ranks.probe_tokens=128", "evaluation.seq_len=512", *SHORT_TEXT],
    )
    export(run.folder, folder / "out", compression=0.5)
    return contents(folder)


def test_equal_requests_give_equal_bytes_with_any_hash_seed(tmp_path: Path) -> None:
    """Statistics, bases, the table of measured points, and the whole checkpoint."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = calibrated_and_exported(tmp_path / "here")
    finally:
        torch.set_num_threads(threads)
    program = "import sys, pathlib, test_trust; test_trust.calibrated_and_exported(pathlib.Path(sys.argv[1]))"
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    environment["OMP_WAIT_POLICY"] = "passive"  # on a busy machine threads that spin take longer than the work
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "there")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    there = contents(tmp_path / "there")
    # They say how long it took, or have a hash of what does.
    times = {f"run/{name}" for name in ("log.txt", "run.json", "manifest.json", "report.html")}
    assert times | {"run/tables/latest.json", "run/bases/layer-0000.safetensors", "out/report.html"} <= here.keys()
    assert {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)} <= times
