"""Commands as processes: two on one folder, interrupted ones, and what they leave and say."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import rotor
from support.paths import DEMO_MODEL, ROOT
from support.runs import SMALL_OPTIONS as SETTINGS
from support.runs import calibrated

from rotor import Run, export
from rotor.search.table import RankTable

pytestmark = pytest.mark.nightly

SERVER = """
import json, os, signal, sys, time
from rotor import cli
from rotor.calibration.partial import PartialRun
from rotor.search.table import RankTable

def pausing(function, at):
    count = 0
    def wrapper(*arguments):
        nonlocal count
        function(*arguments)
        count += 1
        if count == at:
            print("paused", flush=True)
            time.sleep(600)
    return wrapper

for line in sys.stdin:
    arguments, at, errors = json.loads(line)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        PartialRun.commit, RankTable.save = pausing(PartialRun.commit, at), pausing(RankTable.save, at)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.argv = ["rotor", *arguments]
        try:
            cli.main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports rotor once, and runs commands in processes of their own that pause where something was just saved."""


class Paused:
    """A command that has just saved something for the `at`-th time, in another process."""

    def __init__(self, server: subprocess.Popen[str], errors: Path, at: int, *arguments: str | Path) -> None:
        self.server, self.errors = server, errors
        assert server.stdin is not None
        server.stdin.write(json.dumps([[*map(str, arguments)], at, str(errors)]) + "\n")
        server.stdin.flush()
        self.pid = int(self._line())
        assert self._line() == "paused", errors.read_text()

    def _line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal: exit code, and what was said on stderr."""
        os.kill(self.pid, number)
        return int(self._line()), self.errors.read_text()


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


@pytest.fixture
def pause(server, tmp_path: Path):
    return lambda at, *arguments: Paused(server, tmp_path / "errors.txt", at, *arguments)


def test_calibrate_is_alone_on_its_folder_and_resumes_after_ctrl_c(tiny, tmp_path: Path, pause, capsys) -> None:
    out = tmp_path / "run"
    command = ["calibrate", tiny("llama"), "-o", out, *SETTINGS]
    first = pause(1, *command)
    for arguments in (command, [*command, "--resume"], [*command, "--overwrite"]):
        code, said, error = rotor(capsys, *arguments)
        assert (code, said) == (2, "")
        assert f"{out}: in use by another process." in error
    code, error = first.end(signal.SIGINT)
    assert code == 130
    assert error.splitlines()[-2:] == [
        "error: interrupted.",
        f"  {out}.partial holds 1 finished layer(s): the same command with --resume goes on.",
    ]
    assert "Traceback" not in error
    assert not out.exists()
    assert {p.name for p in tmp_path.iterdir()} == {"run.partial", "errors.txt"}
    assert "ended by KeyboardInterrupt" in (tmp_path / "run.partial" / "log.txt").read_text()
    assert rotor(capsys, *command, "--resume", "-q")[0] == 0
    Run.open(out)
    log = (out / "log.txt").read_text()
    assert log.index("ended by KeyboardInterrupt") < log.index("calibrate has finished")
    assert {p.name for p in tmp_path.iterdir()} == {"run", "errors.txt"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stale_lock_is_taken_over(number: int, tiny, tmp_path: Path, pause, capsys) -> None:
    command = ["calibrate", tiny("llama"), "-o", tmp_path / "run", *SETTINGS]
    code, _ = pause(1, *command).end(number)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert (tmp_path / ".run.rotor-lock").exists() is (number == signal.SIGKILL)
    assert rotor(capsys, *command, "--resume", "-q")[0] == 0
    assert {p.name for p in tmp_path.iterdir()} == {"run", "errors.txt"}


def test_interrupted_before_the_first_layer(tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    """Gradients are kept, as they took long; without them nothing is left."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    command = ["calibrate", tiny("llama"), "-o", tmp_path / "run", *SETTINGS, "-q"]
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("rotor.calibration.calibrate"), "layer_statistics", interrupted)
        code, _, error = rotor(capsys, *command, "--recipe", "fdc")
        assert (code, list(tmp_path.iterdir())) == (130, [])
        nothing = "  No layer was finished and no partial output was left; give the same command again."
        assert error.splitlines()[1] == nothing
        code, _, error = rotor(capsys, *command)
        assert (code, list(tmp_path.iterdir())) == (130, [tmp_path / "run.partial"])
        kept = (
            f"  {tmp_path}/run.partial holds gradients of the layers from 0 on: the same command with --resume goes on."
        )
        assert error.splitlines()[1] == kept
    assert rotor(capsys, *command, "--resume")[0] == 0
    Run.open(tmp_path / "run")


def test_export_is_alone_on_its_folders_and_keeps_points_after_ctrl_c(tmp_path: Path, pause, capsys) -> None:
    run, other = (calibrated(DEMO_MODEL, tmp_path / name, "post", 1).folder for name in ("run", "other"))
    out = tmp_path / "out"
    command = ["export", run, "-o", out, "--accuracy", "0.5"]
    first = pause(2, *command)
    for arguments, folder in (
        (["export", run, "-o", tmp_path / "out-2", "--compression", "0.5"], run),
        (["export", other, "-o", out, "--compression", "0.5"], out),
        (["calibrate", DEMO_MODEL, "-o", run, "--overwrite", *SETTINGS], run),
    ):
        code, said, error = rotor(capsys, *arguments)
        assert (code, said) == (2, "")
        assert f"{folder}: in use by another process." in error
    (tmp_path / "alias").symlink_to(run)
    code, _, error = rotor(capsys, "export", tmp_path / "alias", "-o", tmp_path / "out-2", "--compression", "0.5")
    assert code == 2, error
    code, error = first.end(signal.SIGINT)
    assert code == 130
    assert error.splitlines()[-2:] == [
        "error: interrupted.",
        f"  Nothing was written to {out}; what was measured is kept in {run}: the same command goes on.",
    ]
    assert not out.exists()
    kept = RankTable.latest(Run.open(run))
    assert kept is not None
    assert len(kept.points) == 2
    code, said, error = rotor(capsys, *command, "--json")
    assert code == 0, error
    table = RankTable.latest(Run.open(run))
    assert table is not None
    measured = sum(point.has(split) for point in table.points for split in ("search", "report"))
    assert json.loads(said)["measured_points"] == measured - 2
    assert {p.name for p in tmp_path.iterdir()} == {"run", "other", "alias", "out", "errors.txt"}


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_follow_the_umask(mask: int, tiny, tmp_path: Path) -> None:
    """And sidecars are the same bytes."""
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    (model / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n\xc3\xa9")
    (model / "generation_config.json").write_bytes(b'{ "do_sample":false }')
    (model / "tokenizer.json").chmod(0o600)
    before = os.umask(mask)
    try:
        run = calibrated(model, tmp_path / "run", "post", 1)
        export(run.folder, tmp_path / "out", compression=0.4)
    finally:
        os.umask(before)
    written = [path for name in ("run", "out") for path in (tmp_path / name, *(tmp_path / name).rglob("*"))]
    assert len([path for path in written if path.suffix == ".safetensors"]) >= 3
    for path in written:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
