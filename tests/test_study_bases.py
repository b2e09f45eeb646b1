"""How a study compares bases and spectra: distances, principal angles, variation, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rotor.bases.layer import LayerBases
from rotor.bases.pair import BasisPair
from rotor.study.bases import basis_difference, compare_bases, first_value_variation
from rotor.study.part import find_part
from rotor.study.request import StudyPlan


def random_basis(groups: int, dim: int, channels: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(groups, dim, channels, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(matrices).Q


def layer_of(basis: torch.Tensor) -> LayerBases:
    return layer(*[[1.0] * basis.shape[-1]] * len(basis), basis=basis)


def layer(*values: list[float], basis: torch.Tensor | None = None) -> LayerBases:
    singular_values = torch.tensor(values, dtype=torch.float64)
    if basis is None:
        basis = torch.eye(singular_values.shape[1], dtype=torch.float64).expand(len(values), -1, -1)
    pair = BasisPair(basis, basis, singular_values)
    return LayerBases("post", 1, pair, pair)


def test_signs_and_scales_of_vectors_do_not_count() -> None:
    basis = random_basis(2, 8, 8)
    flipped = basis * torch.tensor([1.0, -1, 1, -1, -1, 1, 1, -1]) * torch.arange(1, 9)
    assert basis_difference([basis], [flipped])["delta"] < 1e-15
    assert compare_bases([layer_of(basis)], [layer_of(flipped)])["vo"]["angles_degrees"]["0.5"]["largest"] < 1e-4


def test_delta_and_epsilon_by_hand() -> None:
    """(1, 0), (0, 1) against (0.6, 0.8), (-0.8, 0.6): epsilon 1/2, and |differences| 0.4, 0.8, 0.8, 0.4."""
    basis = torch.eye(2, dtype=torch.float64)[None]
    other = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
    assert basis_difference([basis], [other]) == pytest.approx({"epsilon": 0.5, "delta": 0.6, "ratio": 1.2})


@pytest.mark.parametrize("angle", [0.3, math.pi / 4, math.pi / 2])
def test_rotated_subspace_has_the_angle_of_its_rotation(angle: float) -> None:
    """span(e0, e1) against span(e0, cos e1 + sin e2), half of four channels, in a rotated space."""
    basis = torch.eye(4, dtype=torch.float64)[None]
    other = basis.clone()
    other[0, :, 1] = torch.tensor([0.0, math.cos(angle), math.sin(angle), 0.0])
    rotation = random_basis(1, 4, 4, seed=1)
    found = compare_bases([layer_of(rotation @ basis)], [layer_of(rotation @ other)])["qk"]["angles_degrees"]
    assert found["0.5"] == pytest.approx({"mean": math.degrees(angle) / 2, "largest": math.degrees(angle)}, abs=1e-3)
    assert found["0.25"]["largest"] < 1e-4


def test_variation_by_hand() -> None:
    layers = [layer([2.0], [4.0], [4.0], [4.0]), layer([5.0], [5.0], [7.0], [9.0])]
    assert first_value_variation(layers, "qk") == pytest.approx(2 / 5)
    assert first_value_variation([layer([0.0, 0.0])], "vo") == 0


def test_parts_that_look_at_one_side_take_two_latents(tmp_path) -> None:
    """A joint basis has no channels of one side: cutting or comparing them ended in an error of shapes."""
    plan = StudyPlan.of(["rotor"], parts=["tokens", "pruning"])
    assert plan.recipes["rotor"].joins_latents
    study: Any = SimpleNamespace(plan=plan, store=SimpleNamespace(folder=tmp_path))
    recipes = [r for name in plan.parts for task in find_part(name).tasks(study) for r in task.calibrations.values()]
    assert len(recipes) > 15
    assert not any(recipe.joins_latents for recipe in recipes)
