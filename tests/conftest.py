"""Shared fixtures: tiny models with random weights, and runs on the bundled model."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shortcuts import DEMO_MODEL, ROOT, figures_as_ever, quicker
from tiny_models import CONFIGS, LLAMA3_ROPE, MOE, NO_ROPE, SIZES, build_tiny  # noqa: F401

from rotor.calibration.calibrate import calibrate
from rotor.calibration.run import Run
from rotor.checkpoint.manifest import Manifest, write_manifest
from rotor.cli import console
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model
from rotor.models.source import Checkpoint
from rotor.search.compressible import CompressibleModel

console.SECONDS_BETWEEN_LINES = math.inf  # no test goes by how busy the machine is


@pytest.fixture(scope="session", autouse=True)
def shortcuts() -> Iterator[None]:
    with quicker():
        yield


@pytest.fixture(scope="module")
def figures(shortcuts: None) -> Iterator[None]:
    """Reports with figures, for the rest of a module."""
    with figures_as_ever():
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
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


FAST_EVALUATION = [
    "evaluation.seq_len=128",
    "evaluation.search_tokens=1024",
    "evaluation.report_tokens=1024",
    "evaluation.lookup_prompts=8",
    "evaluation.copy_prompts=8",
    "search.resolution=0.1",
]
"""Overrides for tests that need a measured table but not a precise one."""

SHORT_TEXT = [
    "evaluation.source=text",
    f"evaluation.path={ROOT / 'LICENSE'}",
    "evaluation.search_tokens=512",
    "evaluation.report_tokens=512",
    "evaluation.lookup_prompts=8",
    "evaluation.copy_prompts=8",
]
"""And for those that need some measurement: a text that is tokenised in no time, and few prompts."""


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory):
    """demo_run(recipe) -> a run of the bundled model with few tokens, calibrated once a session; do not write to it."""
    runs: dict[str, Run] = {}

    def get(recipe: str) -> Run:
        if recipe not in runs:
            out = tmp_path_factory.mktemp("runs") / recipe
            runs[recipe] = calibrate(DEMO_MODEL, out, recipe, ["tokens.count=2048", *FAST_EVALUATION])
        return runs[recipe]

    return get


@pytest.fixture
def run_copy(demo_run, tmp_path: Path):
    """run_copy(recipe) -> a copy of the shared run that a test may write to."""

    def get(recipe: str) -> Run:
        shutil.copytree(demo_run(recipe).folder, tmp_path / "run", dirs_exist_ok=True)
        return Run.open(tmp_path / "run")

    return get


@pytest.fixture(scope="session")
def policy_models(tiny, tmp_path_factory: pytest.TempPathFactory):
    from policy_models import PolicyModels  # which imports from here

    return PolicyModels(tiny, tmp_path_factory)


@pytest.fixture(scope="session")
def demo() -> tuple[Checkpoint, LayerwiseModel]:
    """The bundled model's checkpoint and the model itself, in float32; do not change it."""
    checkpoint = Checkpoint(DEMO_MODEL)
    return checkpoint, LayerwiseModel.of(load_model(DEMO_MODEL, torch.device("cpu"), torch.float32))


def calibrated(model: Path, out: Path, domain: str, size: int | str, **bases: str) -> Run:
    """A run of a tiny model in a domain and group size; closed-form bases unless said otherwise."""
    overrides = [
        f"groups.domain={domain}",
        f"groups.size={size}",
        f"bases.qk={bases.get('qk', 'kq')}",
        f"bases.vo={bases.get('vo', 'kq')}",
        "tokens.count=1024",
        "tokens.seq_len=64",
        "ranks.multiple_of=4",
        *FAST_EVALUATION,
        *SHORT_TEXT,
    ]
    return calibrate(model, out, "fdc", overrides)


def reseal(folder: Path) -> str:
    """Give an edited run or checkpoint a manifest that fits, as somebody might who means harm; its new digest."""
    return write_manifest(folder, Manifest.read(folder).kind)


def in_memory(run: Run, rewrite_dtype: torch.dtype | None = None) -> CompressibleModel:
    """The run's model in float32 on the CPU, ready to be compressed."""
    return CompressibleModel(Checkpoint(run.model_folder), torch.device("cpu"), torch.float32, rewrite_dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def close(got: object, expected: object) -> bool:
    """Whether two values are equal but for rounding: where weights lie in memory decides how products are summed."""
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(close(got[key], expected[key]) for key in got)
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(close, got, expected))
    if isinstance(got, float) and isinstance(expected, float):
        return got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    return got == expected
