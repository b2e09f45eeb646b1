"""scipy solves for the removal rate, and checks the dynamic programming of bits by integer programming."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from rotor.calibration.allocation.channel_bits import bit_curve, bit_path
from rotor.calibration.allocation.plan import RankInputs, RankPath, Spectra
from rotor.calibration.allocation.removal_rate import RemovalRatePath
from rotor.checkpoint.layout import AttentionShape
from rotor.checkpoint.rows import NIBBLE_BITS, UNIT_NIBBLES, WIDTHS

SHAPE = AttentionShape(3, 2, 2, 64, 128)


def path(seed: int, alike: bool) -> RemovalRatePath:
    generator = torch.Generator().manual_seed(seed)

    def values() -> torch.Tensor:
        found = torch.rand(2, 64, dtype=torch.float64, generator=generator).pow(4).sort(descending=True).values
        return found[:1].expand(2, 64) if alike else found  # equal heads change their ranks at the same rate

    return RemovalRatePath(RankInputs([Spectra(values(), values()) for _ in range(3)], SHAPE, 8))


@pytest.mark.parametrize("alike", [False, True])
def test_the_solved_rate_is_that_of_all_plans(alike: bool) -> None:
    """Between, at and beyond the steps, the solution has the plan and the rate that a look at every plan finds."""
    for seed in range(4):
        solved = path(seed, alike)
        steps = [plan.stored for plan in solved.plans()]
        between = [(low + high) / 2 for low, high in pairwise(steps)]
        for target in [*steps, *between, steps[-1] + 0.01]:
            found, expected = solved.at_compression(target), RankPath.at_compression(solved, target)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert (found.ranks, found.parameter) == (expected.ranks, expected.parameter)


def best_by_integer_programming(curves: list[np.ndarray], units: int) -> float:
    """The least total loss where each curve takes one of its sizes, and all together at most `units`."""
    costs = np.concatenate(curves)
    sizes = np.concatenate([np.arange(len(curve)) for curve in curves])
    one_each = np.zeros((len(curves), len(costs)))
    ends = np.cumsum([len(curve) for curve in curves])
    for row, end in enumerate(ends):
        one_each[row, end - len(curves[row]) : end] = 1
    limits = [LinearConstraint(one_each, 1, 1), LinearConstraint(sizes[None], -np.inf, units)]
    found = milp(costs, constraints=limits, integrality=np.ones_like(costs), bounds=Bounds(0, 1))
    assert found.success
    return float(found.fun)


def test_bytes_are_split_as_integer_programming_splits_them() -> None:
    generator = np.random.default_rng(0)
    curves = [np.sort(generator.random(size))[::-1] for size in (3, 6, 4, 5)]  # not convex
    split = bit_path(curves)
    for units in range(len(split.loss)):
        assert split.loss[units] == pytest.approx(best_by_integer_programming(curves, units))
        chosen = split.split(units)
        assert sum(curve[n] for curve, n in zip(curves, chosen, strict=True)) == pytest.approx(split.loss[units])


def test_widths_of_channels_are_those_of_integer_programming() -> None:
    """Any assignment of widths to channels, not only one that falls with them, has no smaller loss."""
    generator = torch.Generator().manual_seed(3)
    energies = torch.rand(20, generator=generator, dtype=torch.float64).pow(3) * 10
    widths = (0, 2, 4, 8)
    losses = torch.stack([energies * 4.0**-width for width in widths])
    curve = bit_curve(losses, widths)
    nibbles = np.array([width / NIBBLE_BITS for width in widths])
    for units in range(1, len(curve.loss) - 1):
        costs = losses.T.reshape(-1).numpy()
        one_each = np.kron(np.eye(20), np.ones(len(widths)))
        room = np.tile(nibbles, 20)[None]
        limits = [LinearConstraint(one_each, 1, 1), LinearConstraint(room, -np.inf, UNIT_NIBBLES * units)]
        found = milp(costs, constraints=limits, integrality=np.ones_like(costs), bounds=Bounds(0, 1))
        counts = dict(zip(WIDTHS, curve.counts[units].tolist(), strict=True))
        assert sum(width * count for width, count in counts.items()) <= units * UNIT_NIBBLES * NIBBLE_BITS
        assert curve.loss[units] == pytest.approx(found.fun, rel=1e-6)
