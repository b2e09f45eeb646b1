"""Shared fixtures: tiny models with random weights, and runs on the bundled model."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rotor import Run, calibrate
from rotor.cli import console
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model
from rotor.models.source import Checkpoint
from support.paths import DEMO_MODEL
from support.policy_models import PolicyModels
from support.runs import FAST_EVALUATION
from support.shortcuts import quicker
from support.tiny_models import build_tiny

console.SECONDS_BETWEEN_LINES = math.inf  # no test goes by how busy the machine is


@pytest.fixture(scope="session", autouse=True)
def shortcuts() -> Iterator[None]:
    with quicker():
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny(family) -> folder of a tiny float32 model, built once a session."""
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = build_tiny(family, tmp_path_factory.mktemp("models") / family)
        return built[family]

    return get


EXTRA_BYTES = 3 << 30
"""Address space that the mutations may take beyond what the process has."""


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """An allocation that follows a number in a file fails at once, as a MemoryError that no test expects."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def few_written_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model writes two rows of 32 tokens, or of a few less, at a time."""
    monkeypatch.setattr("rotor.models.tokens.SAMPLING_TOKENS", 64)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """demo_run(recipe) -> a run of the bundled model with few tokens, calibrated once a session; do not write to it."""
    runs: dict[str, Run] = {}

    def get(recipe: str) -> Run:
        if recipe not in runs:
            out = tmp_path_factory.mktemp("runs") / recipe
            short = ["tokens.count=1024", "tokens.seq_len=128"]
            runs[recipe] = calibrate(DEMO_MODEL, out, recipe, [*short, *FAST_EVALUATION])
        return runs[recipe]

    return get


@pytest.fixture
def run_copy(demo_run: Callable[[str], Run], tmp_path: Path) -> Callable[[str], Run]:
    """run_copy(recipe) -> a copy of the shared run that a test may write to."""

    def get(recipe: str) -> Run:
        shutil.copytree(demo_run(recipe).folder, tmp_path / "run", dirs_exist_ok=True)
        return Run.open(tmp_path / "run")

    return get


@pytest.fixture(scope="session")
def policy_models(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PolicyModels:
    return PolicyModels(tiny, tmp_path_factory)


@pytest.fixture(scope="session")
def demo() -> tuple[Checkpoint, LayerwiseModel]:
    """The bundled model's checkpoint and the model itself, in float32; do not change it."""
    checkpoint = Checkpoint(DEMO_MODEL)
    return checkpoint, LayerwiseModel.of(load_model(DEMO_MODEL, torch.device("cpu"), torch.float32))
