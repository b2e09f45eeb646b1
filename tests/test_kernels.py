"""Runs the checks in tests/interpreted/ under Triton's interpreter, which must be switched on before it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def missing() -> str:
    """Why the interpreter cannot run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    versions = [tuple(int(n) for n in version(name).split(".")[:2]) for name in ("triton", "numpy")]
    if versions[0] < (3, 9) and versions[1] >= (2, 4):
        return "the interpreter of Triton 3.6 does not work with NumPy 2.4 or newer"
    return ""


FOLDER = Path(__file__).parent / "interpreted"


TOGETHER = 8
"""Files of checks in a process: its imports take seconds."""


def checks(word: str = "") -> list[tuple[str, ...]]:
    """Files of checks that contain a word, some at a time."""
    paths = sorted(FOLDER.glob("check_*.py"))
    names = [path.stem for path in paths if word in path.read_text("utf-8")]
    return [tuple(names[start : start + TOGETHER]) for start in range(0, len(names), TOGETHER)]


def interpret(names: tuple[str, ...], marks: str) -> None:
    paths = [str(FOLDER.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "interpreter",
         "-m", marks, *(str(FOLDER / f"{name}.py") for name in names)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1",
             "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        cwd=FOLDER.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("names", checks(), ids="+".join)
def test_in_the_interpreter(names: tuple[str, ...]) -> None:
    interpret(names, "not slow")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("names", checks("mark.slow"), ids="+".join)
def test_more_in_the_interpreter(names: tuple[str, ...]) -> None:
    interpret(names, "slow")
