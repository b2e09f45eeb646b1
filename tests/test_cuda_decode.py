"""The study in CUDA C++: its mathematics by an emulator of a GPU's threads, and what nvcc makes of it."""

from __future__ import annotations

import shutil

import pytest
import torch
from gpu.cuda_decode import KEYS, Launch, count, hazards, random_step, shared_library
from support.compare import relative_error
from support.quick import mostly_nightly

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

CASES = {
    "several sequences, groups and slices": ((2, 3 * KEYS, 2, 64), 8, {"spread": 0.5}),
    "a reference that moves": ((1, 6 * KEYS, 1, 128), 1, {"drift": 40.0}),
    "few keys that count": ((1, 4 * KEYS, 1, 128), 2, {"peaks": 3}),
    "wide rows": ((1, 3 * KEYS, 1, 256), 3, {}),
}
"""Sequences, keys, groups and bytes of a row; programs; what is drawn."""


@needs_gcc
@pytest.mark.parametrize("name", mostly_nightly(CASES, lambda name: name in ("a reference that moves", "wide rows")))
def test_attention_over_packed_nibbles_is_that_of_float64(name: str) -> None:
    sizes, programs, drawn = CASES[name]
    step = random_step(sizes, torch.Generator().manual_seed(1), **drawn)
    launch = Launch.of(step, programs)
    assert launch.values.shape[2] == programs // (sizes[0] * sizes[2])
    launch.run(shared_library(sizes[-1], arch=None))
    assert relative_error(launch.attended(), step.attended()) < 5e-4
    moved = launch.sums[..., 0, :, 2]
    assert (moved == launch.sums[..., 1, :, 2]).all()  # one reference of a query row for all warps
    if "drift" in drawn:
        assert moved.max() > 20


@needs_nvcc
@pytest.mark.parametrize(
    ("size", "arch", "most"),
    mostly_nightly(
        [(size, arch, most) for size, most in ((64, 6.0), (128, 8.5), (256, 13.0)) for arch in (80, 90)],
        lambda case: case[:2] == (128, 90),
    ),
)
def test_it_issues_what_notes_say_and_spills_nothing(size: int, arch: int, most: float) -> None:
    found = count(size, arch)
    assert found.spilled_bytes == 0
    assert found.registers <= (128 if size <= 128 else 168)
    assert 0.8 * most < found.instructions_per_key < most


def test_hazards_are_read_from_what_racecheck_prints() -> None:
    assert hazards("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)") == 3
    with pytest.raises(RuntimeError, match="compute-sanitizer: no device"):
        hazards("no device")
