"""The tests' shortcuts change nothing: what users run, in processes of their own, gives the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import rotor
from support.paths import DEMO_MODEL, ROOT
from support.runs import SMALL_OPTIONS

STUDY = ["study", str(DEMO_MODEL), "--recipes", "fdc", "-q", *SMALL_OPTIONS]


def as_users_do(*arguments: str) -> None:
    """Run a command in a fresh process, which no fixture reaches."""
    done = subprocess.run([sys.executable, "-m", "rotor", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def commands(folder: Path) -> list[list[str]]:
    run, out = str(folder / "run"), str(folder / "out")
    return [
        ["calibrate", str(DEMO_MODEL), "-o", run, "--recipe", "fdc", "-q", *SMALL_OPTIONS],
        ["export", run, "-o", out, "--compression", "0.5", "-q"],
        ["validate", out, "-q"],
        ["inspect", str(DEMO_MODEL)],
    ]


def digests(folder: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((folder / "manifest.json").read_text())["files"]
    return files


@pytest.mark.nightly
def test_a_checkpoint_is_the_same_without_shortcuts(tmp_path: Path, capsys) -> None:
    plain, quick = tmp_path / "plain", tmp_path / "quick"
    for words in commands(plain):
        as_users_do(*words)
    for words in commands(quick):
        assert rotor(capsys, *words)[0] == 0
    ours, theirs = digests(plain / "out"), digests(quick / "out")
    assert ours == theirs


@pytest.mark.nightly
def test_plots_of_a_study_are_laid_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    as_users_do(*STUDY, "-o", str(tmp_path / "study"))
    (plot,) = (tmp_path / "study" / "plots").glob("recipes.svg")
    assert plot.read_text("utf-8").count("<path") > 20
