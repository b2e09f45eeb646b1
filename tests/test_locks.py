"""Two processes on one folder."""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rotor.errors import CheckpointError, UsageError
from rotor.format.locks import exclusive, lock_path

HOLDER = """
import sys, time
from pathlib import Path
from rotor.format.locks import exclusive
with exclusive(Path(sys.argv[1]), "calibrate"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n", process.stderr.read() if process.stderr else ""
    yield process
    process.kill()
    process.wait()


def test_the_second_is_told_who_holds_it(tmp_path: Path, holder) -> None:
    with pytest.raises(UsageError, match="in use by") as error, exclusive(tmp_path / "run", "export"):
        pass
    assert f"process {holder.pid} on {platform.node()} (rotor calibrate, since 20" in error.value.message
    with exclusive(tmp_path / "other", "export"):
        pass


def test_a_killed_holder_leaves_a_stale_lock_that_is_taken_over(tmp_path: Path, holder) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    path = lock_path(tmp_path / "run")
    assert path.is_file()
    with exclusive(tmp_path / "run", "export"):
        assert path.is_file()
    assert not path.exists()


def test_nothing_is_left_after_errors_and_a_relative_path_is_the_same_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lock_path(Path("run")) == lock_path(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path / "run", "calibrate"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is no folder"), exclusive(tmp_path / "file" / "run", "export"):
        pass


def test_a_place_that_cannot_be_written_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither the folder is there nor the file beside it can be made, as on a read-only mount."""

    def read_only(path: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("rotor.format.locks._open", read_only)
    with (
        pytest.raises(CheckpointError, match="cannot be written \\(Read-only file system\\)"),
        exclusive(tmp_path / "run", "x"),
    ):
        pass
    (tmp_path / "run").mkdir()
    with exclusive(tmp_path / "run", "x"):  # the folder itself is locked
        pass
