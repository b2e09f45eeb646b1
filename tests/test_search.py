"""The search for a target on synthetic accuracies: which plans are measured, and which one is chosen."""

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rotor.errors import AccuracyError
from rotor.recipe.sections import Search
from rotor.search.evaluation.accuracy import Fidelity
from rotor.search.plan_choice import find_plan

STEPS = [i * 0.00625 for i in range(150)]


def path_of(
    savings: list[float], lighter: Any = lambda plan: [], loss: Callable[[float], float | None] = lambda saving: None
) -> Any:
    steps = [SimpleNamespace(stored=s, loss=loss(s)) for s in savings]
    return SimpleNamespace(plans=lambda: steps, lighter=lighter)


class Fake:
    """Measures nothing: a plan's accuracy is a function of its saving; its interval is `width` to either side."""

    def __init__(self, curve: Any, steps: list[float], width: float = 0.01, **path: Any) -> None:
        self.curve, self.width, self.asked = curve, width, []
        self.path = path_of(steps, **path)

    def __call__(self, plan: Any) -> Fidelity:
        self.asked.append(plan.stored)
        value = self.curve(plan.stored)
        return Fidelity(value, (value - self.width, value + self.width), {})

    def find(self, target: float, resolution: float = 0.01) -> float:
        return find_plan(self.path, Search(resolution), target, self).stored


def cliff(edge: float, beyond: float) -> Any:
    return lambda saving: 1.0 - 0.01 * saving if saving < edge else beyond - (saving - edge)


@pytest.mark.parametrize("resolution", [0.0065, 0.01, 0.03])
@pytest.mark.parametrize("edge", [0.807, 0.3, 0.013, 0.92])
def test_the_chosen_plan_and_the_next_refused_one_are_at_most_the_resolution_apart(
    edge: float, resolution: float
) -> None:
    fake = Fake(cliff(edge, 0.93), STEPS)
    chosen = fake.find(0.95, resolution)
    assert edge - resolution <= chosen < edge
    assert min((s for s in fake.asked if s > chosen), default=STEPS[-1]) - chosen <= resolution + 1e-9
    assert len(fake.asked) <= Search(resolution).points(predicted=False)


def falling(saving: float) -> float:
    """A predicted loss."""
    return 1e-5 * math.exp(11 * saving)


def test_predicted_losses_take_the_place_of_halvings() -> None:
    """Accuracy falls by a power of the predicted loss: fewer plans are measured, whatever the factor; without noise the
    result is as near to the target as by bisection."""
    search, counts = Search(0.0125, tries=0), []
    for power, lost in product((0.7, 1.0, 1.3), (0.3, 3.0, 30.0)):

        def curve(saving: float, power: float = power, lost: float = lost) -> float:
            return 1 - 0.01 * lost * (falling(saving) / 0.005) ** power

        guided, bisected = Fake(curve, STEPS, width=0.0, loss=falling), Fake(curve, STEPS)
        chosen, expected = (find_plan(fake.path, search, 0.99, fake).stored for fake in (guided, bisected))
        assert curve(chosen) >= 0.99
        assert abs(chosen - expected) <= 0.0125 + 1e-9
        counts.append((len(guided.asked), len(bisected.asked)))
    guesses, halvings = np.sum(counts, axis=0)
    assert guesses <= 0.6 * halvings


def test_the_plan_that_is_chosen_keeps_the_target_on_other_text_four_times_in_five() -> None:
    """Not the luckiest: plans of one sample share its luck, and each has some of its own. By bisection less than half
    of the choices keep it."""
    generator = np.random.default_rng(0)

    def lost(saving: float) -> float:
        return 0.6 * falling(saving)

    def chosen(loss: Any) -> tuple[float, float]:
        common, other = np.exp(0.15 * generator.standard_normal(2))

        def measure(plan: Any) -> Fidelity:
            value = lost(plan.stored) * common * math.exp(0.1 * generator.standard_normal())
            return Fidelity(1 - value, (1 - 1.35 * value, 1 - 0.65 * value), {})

        plan = find_plan(path_of(STEPS, loss=loss), Search(0.01), 0.99, measure)
        return lost(plan.stored) * other * math.exp(0.1 * generator.standard_normal()), plan.stored

    guided = np.array([chosen(falling) for _ in range(400)])
    lucky = np.array([chosen(lambda saving: None) for _ in range(400)])
    assert 0.76 <= (guided[:, 0] <= 0.01).mean() <= 0.95
    assert (lucky[:, 0] <= 0.01).mean() < 0.5
    exact = max(s for s in STEPS if lost(s) <= 0.01)
    assert exact - 0.025 <= guided[:, 1].mean() <= exact - 0.01


@pytest.mark.parametrize("loss", [lambda saving: 1e-9 + saving**40, lambda saving: 1e3 * (1 + saving)])
def test_wrong_predictions_cost_points_and_no_accuracy(loss: Callable[[float], float]) -> None:
    fake = Fake(cliff(0.807, 0.93), STEPS, loss=loss)
    assert 0.787 <= fake.find(0.95, 0.01) < 0.807
    assert len(fake.asked) == len(set(fake.asked)) <= 2 * Search(0.01).points(predicted=False)
    assert fake.find(1.0) == 0.0  # nothing may be lost, so nothing is predicted


def test_a_dip_of_accuracy_does_not_end_the_search() -> None:
    """Plans between refused ones are tried, and gaps halved from one that reaches the target; three gaps at a time."""

    def dipping(saving: float) -> float:
        return 0.9 if 0.5 < saving < 0.53 or saving > 0.575 else 1.0

    fake = Fake(dipping, STEPS)
    assert 0.565 <= fake.find(0.95) <= 0.575
    assert len(fake.asked) == len(set(fake.asked)) <= 2 * Search(0.01).points(predicted=False)
    bisected = Fake(dipping, STEPS)
    assert 0.49 <= find_plan(bisected.path, Search(0.01, tries=0), 0.95, bisected).stored <= 0.5
    assert len(bisected.asked) < len(fake.asked)
    far = Fake(lambda saving: 0.9 if 0.2 < saving < 0.9 else 1.0, STEPS)
    assert 0.19 <= far.find(0.95) <= 0.2


def test_paths_of_few_or_of_equal_plans() -> None:
    """Neighbours further apart than the resolution are both measured; everything and nothing can be the answer."""
    fake = Fake(cliff(0.83, 0.5), [0.0, 0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.82, 0.84, 0.9])
    assert fake.find(0.95, 0.001) == 0.82
    assert {0.82, 0.84} <= set(fake.asked)
    assert Fake(lambda saving: 1.0, STEPS).find(0.95) >= STEPS[-1] - 0.01
    assert Fake(lambda saving: 1.0 - saving, STEPS).find(1.0) == 0.0
    assert Fake(lambda saving: 1.0, [0.3]).find(0.95) == 0.3


def test_out_of_reach_names_the_best_that_was_measured() -> None:
    fake = Fake(lambda saving: 0.9 - saving, STEPS)
    with pytest.raises(
        AccuracyError, match=r"accuracy 0.95 is out of reach: the best measured is 0.9000, at compr.* 0.0"
    ):
        fake.find(0.95)
    with pytest.raises(AccuracyError, match="has no rank plans to measure"):
        Fake(fake.curve, []).find(0.95)


def test_beside_the_path_units_are_taken_while_the_target_is_reached() -> None:
    """Two units are taken, each from the second layer that is tried; then the first three of four break the model."""

    def lighter(plan: Any) -> list[Any]:
        layers = "abcd" if plan.stored > 0.45 else "ab"
        return [SimpleNamespace(stored=plan.stored + 0.05, taken=layer) for layer in layers]

    def fidelity(plan: Any) -> Fidelity:
        tried.append((round(plan.stored, 2), getattr(plan, "taken", "")))
        reached = plan.stored <= 0.4 or (plan.stored < 0.52 and getattr(plan, "taken", "") == "b")
        return Fidelity(1.0 if reached else 0.9, (0.9, 1.0), {})

    tried: list[tuple[float, str]] = []
    path = path_of([0.2, 0.4, 0.6], lighter)
    chosen: Any = find_plan(path, Search(0.01), 0.95, fidelity)
    assert (round(chosen.stored, 2), chosen.taken) == (0.5, "b")
    assert tried[-3:] == [(0.55, "a"), (0.55, "b"), (0.55, "c")]
    assert find_plan(path, Search(0.1), 0.95, fidelity).stored == 0.4  # units below the resolution
