"""Simulated searches: how the size of a search's sample decides what it removes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from samples import TARGET, SampleScores, SimulatedPath

LOSSES = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]
"""Predicted losses of the plans that are measured; accuracy falls by as much."""


def scores(loss: float, noise: float) -> SampleScores:
    """Scores of a plan whose accuracy is 1 - loss in the mean, with errors of single prompts."""
    draw = np.random.default_rng(round(1e6 * loss)).normal(0, noise, 60) if loss else np.zeros(60)
    answers = 30 * (1 - loss - loss * draw)
    stored = 0.5 + 0.05 * math.log2(loss / LOSSES[0]) if loss else 0.0
    return SampleScores(
        stored,
        loss,
        60 * 500,
        nll=[500 * (2 - math.log1p(-loss / 2))] * 60,
        correct=[250.0] * 60,
        lookup=[1.0] * 60,
        copy=answers.tolist(),
    )


def path(noise: float) -> SimulatedPath:
    return SimulatedPath(scores(0, noise), [scores(loss, noise) for loss in LOSSES])


def test_without_noise_any_sample_leads_to_the_last_plan_that_keeps_the_target() -> None:
    plans = path(0.0)
    kept = [plans.measurement(step, *map(np.arange, plans.pool)).value for step in range(len(plans.steps))]
    last = max(step.stored for step, value in zip(plans.steps, kept, strict=True) if value >= TARGET)
    for sample in (500, 4, 4, 0.001), (20_000, 40, 40, 0.001):
        row = plans.simulate(*sample, draws=3)
        assert float(row["removed, mean"]) == pytest.approx(last, abs=0.006)
        assert (row["below"], row["none"]) == ("0.00", "0.00")


def test_more_prompts_remove_more_and_scatter_less() -> None:
    """By 4 copies, each of which may lose a multiple of the mean, searches are cautious, or wrong."""
    plans = path(3.0)
    few, many = (plans.simulate(20_000, 40, copies, 0.005, draws=40) for copies in (4, 60))

    def width(row: dict) -> float:
        low, high = (float(part) for part in row["removed, 5 % to 95 %"].split(" to "))
        return high - low

    assert width(many) < width(few) / 1.5
    assert float(many["removed, mean"]) > float(few["removed, mean"]) - 0.02
