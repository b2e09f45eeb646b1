"""Calibrations in processes that are killed, and one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from rotor import Run, calibrate
from support.paths import ROOT
from support.tiny_models import CONFIGS, SIZES, build_tiny

LAYERS = 3
SETTINGS = ["tokens.source=random", "tokens.count=448", "tokens.seq_len=64", "groups.size=1", "ranks.multiple_of=4"]
"""Seven rows: a number that neither two nor three divide."""

DRIVER = """
import importlib, os, signal, sys
import rotor
from rotor.calibration.partial import PartialRun

module = importlib.import_module("rotor.calibration.calibrate")
model, out, settings = sys.argv[1], sys.argv[2], sys.argv[4:]

def run(**options):
    place = out + options.pop("name")
    module.calibrate(model, place, "rotor-16", settings, batch_tokens=64, offload="always", **options)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wait(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
"""
"""A process that forks before it computes anything, so that torch is imported once for many runs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers in several shards."""
    CONFIGS["three-layers"] = lambda: LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS})
    try:
        return build_tiny("three-layers", tmp_path_factory.mktemp("model") / "m", max_shard_size="200KB")
    finally:
        del CONFIGS["three-layers"]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, offload="always")


def drive(program: str, model: Path, out: Path, *overrides: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER + program, str(model), str(out), "--", *SETTINGS, *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def tensors(run: Run) -> dict[str, bytes]:
    """The files that must not depend on how a run came about: all but the times in run.json, its hash, and the log."""
    times = ("run.json", "manifest.json", "log.txt")
    files = sorted(p for p in run.folder.rglob("*") if p.is_file() and p.name not in times)
    return {str(path.relative_to(run.folder)): path.read_bytes() for path in files}
