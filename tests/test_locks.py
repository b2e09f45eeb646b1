"""Two processes on one folder."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
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


def test_a_place_that_cannot_be_written_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither the folder is there nor the file beside it can be made, as on a read-only mount."""

    opened = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, mode)

    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is no folder"), exclusive(tmp_path / "file" / "run", "export"):
        pass
    monkeypatch.setattr(os, "open", read_only)
    with (
        pytest.raises(CheckpointError, match="cannot be written \\(Read-only file system\\)"),
        exclusive(tmp_path / "run", "x"),
    ):
        pass
    (tmp_path / "run").mkdir()
    with (  # the folder itself is locked
        exclusive(tmp_path / "run", "x"),
        pytest.raises(UsageError, match="in use by another process"),
        exclusive(tmp_path / "run", "y"),
    ):
        pass


def test_planted_locks(tmp_path: Path) -> None:
    """A link, a pipe, a folder, somebody's file, a second name of it: refused at once, and as they were."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    path = lock_path(folder)
    for plant in (
        lambda: path.symlink_to(victim),
        lambda: path.symlink_to(tmp_path / "nowhere"),
        lambda: os.mkfifo(path),
        lambda: os.link(victim, path),
        lambda: path.write_text("somebody's"),
        path.mkdir,
    ):
        plant()
        with pytest.raises(CheckpointError, match="is not a lock that rotor wrote"), exclusive(folder, "export"):
            pass
        assert os.path.lexists(path)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    path.write_text("")  # of a process that was killed before it wrote anything
    with exclusive(folder, "export"):
        pass
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_locks_of_other_users(tmp_path: Path) -> None:
    """A stale lock file of somebody else is taken over; one beside which nobody may write is locked itself."""
    for parent in tmp_path.parents[: len(tmp_path.parents) - len(Path(tempfile.gettempdir()).parents) - 1]:
        parent.chmod(0o755)  # pytest keeps its folders for itself
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    stale = lock_path(folder)
    for shared in (True, False):
        tmp_path.chmod(0o1777 if shared else 0o755)
        if shared:
            stale.write_text("")
        with exclusive(folder, "calibrate"):
            assert as_nobody(folder) == 2
        if shared:
            stale.write_text("")
        assert as_nobody(folder) == 0


def as_nobody(folder: Path) -> int:
    """Exit code of another user's attempt: 0 held, 2 in use, 1 anything else."""
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            with exclusive(folder, "export"):
                os._exit(0)
        except UsageError:
            os._exit(2)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
