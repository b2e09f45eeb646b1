"""Runs the checks in interpreted/ under Triton's interpreter, which must be switched on before it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)


def missing() -> str:
    """Why the interpreter cannot run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    versions = [tuple(int(n) for n in version(name).split(".")[:2]) for name in ("triton", "numpy")]
    if versions[0] < (3, 9) and versions[1] >= (2, 4):
        return "the interpreter of Triton 3.6 does not work with NumPy 2.4 or newer"
    return ""


FOLDER = Path(__file__).parent / "interpreted"
CHECKS = [path.stem for path in sorted(FOLDER.glob("check_*.py"))]


def interpreted(names: list[str], marks: str) -> None:
    """Run checks with these marks in a process of its own."""
    paths = [str(FOLDER.parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "support.interpreter",
         "-m", marks, *(str(FOLDER / f"{name}.py") for name in names)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1",
             "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        cwd=FOLDER.parent.parent.parent,
    )  # fmt: skip
    assert done.returncode in (0, NO_TESTS), done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_quick_checks_in_the_interpreter() -> None:
    """All in one process, since its imports take seconds."""
    interpreted(CHECKS, "not nightly")


@pytest.mark.nightly
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("name", CHECKS)
def test_the_other_checks_in_the_interpreter(name: str) -> None:
    interpreted([name], "nightly")
