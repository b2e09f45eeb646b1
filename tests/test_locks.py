"""Two processes on one folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rotor.checkpoint.locks import exclusive, lock_path
from rotor.errors import CheckpointError, UsageError

HOLDER = """
import sys, time
from pathlib import Path
from rotor.checkpoint.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_second_is_refused_and_the_lock_of_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    """Whatever name the folder is called by."""
    folder, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="in use by another process"), exclusive(link / "run"):
            pass
        with exclusive(tmp_path / "other"):
            pass
        os.kill(process.pid, signal.SIGKILL)
    assert lock_path(folder).is_file()
    with exclusive(folder):
        assert lock_path(folder).is_file()
    with pytest.raises(ZeroDivisionError), exclusive(folder):
        raise ZeroDivisionError
    assert {path.name for path in tmp_path.iterdir()} == {"link"}


def test_a_place_that_cannot_be_written_and_a_planted_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="file is no folder"), exclusive(tmp_path / "file" / "run"):
        pass
    lock_path(tmp_path / "run").symlink_to(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"), exclusive(tmp_path / "run"):
        pass
    assert (tmp_path / "file").read_text() == "precious"
