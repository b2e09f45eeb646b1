"""How a study compares bases and spectra: distances, principal angles, variation, by hand and against scipy."""

from __future__ import annotations

import math

import pytest
import torch

from rotor.bases.layer import LayerBases
from rotor.bases.pair import BasisPair
from rotor.errors import UsageError
from rotor.recipe import load_recipe
from rotor.study import parts as study_parts
from rotor.study.comparison import (
    align_signs,
    basis_difference,
    coefficient_of_variation,
    mean_spectrum,
    principal_angles,
    relative_difference,
)
from rotor.study.measure import uniform_ranks


def random_basis(groups: int, dim: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(groups, dim, columns, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(matrices).Q


def test_equal_bases_differ_by_nothing() -> None:
    basis = random_basis(3, 8, 8)
    found = basis_difference([basis, basis], [basis, basis])
    assert found.delta == 0
    assert found.ratio == 0
    assert found.epsilon == pytest.approx(float(basis.abs().mean()))
    assert principal_angles(basis, basis, 5).max() < 1e-7


def test_signs_and_scales_of_vectors_do_not_count() -> None:
    basis = random_basis(2, 8, 8)
    flipped = basis * torch.tensor([1.0, -1, 1, -1, -1, 1, 1, -1]) * torch.arange(1, 9)
    assert basis_difference([basis], [flipped]).delta < 1e-15
    assert torch.equal(align_signs(basis, -basis), basis)
    assert principal_angles(basis, flipped, 4).max() < 1e-7


def test_delta_and_epsilon_by_hand() -> None:
    """(1, 0), (0, 1) against (0.6, 0.8), (-0.8, 0.6): epsilon 1/2, and |differences| 0.4, 0.8, 0.8, 0.4."""
    basis = torch.eye(2, dtype=torch.float64)[None]
    other = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
    found = basis_difference([basis], [other])
    assert found.epsilon == pytest.approx(0.5)
    assert found.delta == pytest.approx(0.6)
    assert found.ratio == pytest.approx(1.2)


@pytest.mark.parametrize("angle", [1e-9, 0.3, math.pi / 4, 1.2, math.pi / 2])
def test_rotated_subspace_has_the_angle_of_its_rotation(angle: float) -> None:
    """span(e0, e1) against span(e0, cos e1 + sin e2), in a rotated space and with mixed columns."""
    basis = torch.eye(4, dtype=torch.float64)[None, :, :2]
    other = basis.clone()
    other[0, 1, 1], other[0, 2, 1] = math.cos(angle), math.sin(angle)
    rotation = random_basis(1, 4, 4, seed=1)
    mixed = other @ torch.tensor([[2.0, 1.0], [0.5, -1.0]], dtype=torch.float64)
    found = principal_angles(rotation @ basis, rotation @ mixed, 2)
    assert found.tolist()[0] == pytest.approx([angle, 0.0], rel=1e-6, abs=1e-14 + 1e-7 * (angle > 1e-6))


def test_principal_angles_agree_with_scipy() -> None:
    subspace_angles = pytest.importorskip("scipy.linalg").subspace_angles
    first, second = random_basis(3, 10, 6, seed=2), random_basis(3, 10, 6, seed=3)
    found = principal_angles(first, second, 4)
    for group in range(3):
        expected = subspace_angles(first[group, :, :4].numpy(), second[group, :, :4].numpy())
        assert found[group].tolist() == pytest.approx(expected.tolist(), abs=1e-10)


def test_bases_that_cannot_be_compared() -> None:
    basis = random_basis(2, 8, 8)
    with pytest.raises(UsageError, match=r"layer 1: bases of shapes \[2, 8, 8\] and \[1, 8, 8\] cannot be compared"):
        basis_difference([basis, basis], [basis, basis[:1]])
    with pytest.raises(UsageError, match="rank 9: expected 1 to 8"):
        principal_angles(basis, basis, 9)


def test_coefficient_of_variation_by_hand() -> None:
    assert coefficient_of_variation(torch.tensor([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])) == pytest.approx(2 / 5)
    assert coefficient_of_variation(torch.full((4,), 3.0)) == 0
    assert coefficient_of_variation(torch.zeros(3)) == 0


def layer(*values: list[float]) -> LayerBases:
    singular_values = torch.tensor(values, dtype=torch.float64)
    basis = torch.eye(singular_values.shape[1], dtype=torch.float64).expand(len(values), -1, -1)
    pair = BasisPair(basis, basis, singular_values)
    return LayerBases("post", 1, pair, pair)


def test_spectra_and_uniform_ranks_by_hand() -> None:
    layers = [layer([4.0, 2.0], [0.0, 0.0]), layer([1.0, 1.0], [8.0, 2.0])]
    assert mean_spectrum(layers, "qk").tolist() == pytest.approx([3 / 4, (0.5 + 0 + 1 + 0.25) / 4])
    wide = [layer([1.0] * 10)] * 2
    assert uniform_ranks(wide, 0.3, "qk") == [[(7, 10)]] * 2
    assert uniform_ranks(wide, 0.99, "vo") == [[(10, 1)]] * 2
    assert relative_difference(torch.tensor([1.0, -3.0]), torch.tensor([2.0, -3.0])) == 0.25


def test_parts_that_look_at_one_side_take_two_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joint basis has no columns of one side: cutting or comparing them ended in an error of shapes."""
    driver = object.__new__(study_parts.StudyParts)
    monkeypatch.setattr(driver, "_text", lambda recipe, split: split, raising=False)
    recipe = load_recipe("rotor")
    assert recipe.joins_latents
    assert not any(variant.joins_latents for variant in driver._token_variants(recipe).values())
