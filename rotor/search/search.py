"""F_p: from an accuracy to the ranks that keep it, by measuring points of a path of rank plans.

A target alone decides which plans are measured, by the search split: those that their predicted losses suggest, or a
bisection over what they save. What was measured before only saves time, so that the same request leads to the same
point, whatever else the table holds.

Source: FDC section 5.2 (the function F_p).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice, pairwise

import numpy as np

from ..calibration.allocation.plan import COMPRESSION_SLACK, Plan, RankPath
from ..calibration.allocation.removal_rate import RemovalRatePath
from ..errors import AccuracyError, UsageError
from ..recipe.sections import Search
from .evaluation.accuracy import Fidelity

FIRST_LOSS = 0.25
"""Predicted loss of the first plan that is measured, in nats for each unit of accuracy that may be lost. Plans of bits
that kept 0.99 had 0.1 to 0.45 of it (SmolLM2-135M, Gemma 3 270M)."""

LEAST_LOST = 1 / 16
"""Least accuracy that a plan is taken to have lost, over what may be lost: less is noise."""


class _Choice:
    """Chooses which plan of a path is measured next, between one that reached the target and one that did not.

    Args:
        steps: plans by what they save. allowed: accuracy that may be lost. resolution: see Search.
    """

    def __init__(self, steps: Sequence[Plan], allowed: float, resolution: float) -> None:
        self._steps, self._allowed, self._resolution = steps, allowed, resolution
        losses = [step.loss for step in steps if step.loss is not None and step.loss > 0]
        self._log_losses = np.log(losses) if len(losses) == len(steps) and allowed > 0 else None
        self._lost: dict[int, float] = {}
        self._gap = math.inf
        self._guessed = False

    def measured(self, index: int, accuracy: float) -> None:
        """Note the accuracy of a plan."""
        self._lost[index] = max(1 - accuracy, LEAST_LOST * self._allowed)

    def gap(self, low: int, high: int) -> float:
        """What lies between two plans, of what they save; below the first and above the last there is nothing."""
        return self._steps[min(high, len(self._steps) - 1)].stored - self._steps[max(low, 0)].stored

    def halfway(self, low: int, high: int) -> int:
        """The plan halfway between two, or the mildest of few that are left."""
        begin, gap = self._steps[max(low, 0)].stored, self.gap(low, high)
        halfway = begin if gap <= self._resolution + COMPRESSION_SLACK else begin + gap / 2
        return min(range(low + 1, high), key=lambda i: abs(self._steps[i].stored - halfway))

    def next(self, low: int, high: int) -> int:
        """The plan whose predicted loss suggests that it just keeps the target.

        It is the one halfway where nothing is predicted, and after a guess between two measured plans that left more
        than half of the gap.
        """
        between = low in self._lost and high in self._lost
        wrong = self._guessed and self.gap(low, high) > self._gap / 2
        self._gap, self._guessed = self.gap(low, high), between and not wrong
        return self.halfway(low, high) if self._log_losses is None or wrong else self._likely(low, high)

    def _likely(self, low: int, high: int) -> int:
        """Where what is lost reaches what may be lost: a power of the predicted loss, by the plans at both ends; in
        proportion to it, and at least a factor of two away, where only one end was measured."""
        assert self._log_losses is not None
        of, aim = self._log_losses, math.log(self._allowed)
        begin, end = self._lost.get(low), self._lost.get(high)
        if begin is None:
            wanted = math.log(FIRST_LOSS) + aim if end is None else of[high] - max(math.log(end) - aim, math.log(2))
        elif end is None:
            wanted = of[low] + max(aim - math.log(begin), math.log(2))
        else:
            wanted = np.interp(aim, [math.log(begin), math.log(end)], [of[low], of[high]])
        index = low + 1 + int(np.abs(of[low + 1 : high] - wanted).argmin())
        return self._closing(low, index, high)

    def _closing(self, low: int, index: int, high: int) -> int:
        """A plan within the resolution of an end, moved as far from it as the search ends by when it is right."""
        stored, reach = [step.stored for step in self._steps], self._resolution + COMPRESSION_SLACK
        if low >= 0 and stored[index] - stored[low] <= reach:
            index = max(i for i in range(index, high) if stored[i] - stored[low] <= reach)
        if high < len(stored) and stored[high] - stored[index] <= reach:
            index = min(i for i in range(low + 1, index + 1) if stored[high] - stored[i] <= reach)
        return index


def find_plan(
    path: RankPath,
    search: Search,
    target: float,
    fidelity: Callable[[Plan], Fidelity],
) -> Plan:
    """The plan that a target leads to, between one that reaches it and one that does not.

    Each plan that is measured lies between the last that reached the target and the last that did not, until they are
    `search.resolution` apart or neighbours: where predicted losses and what was measured suggest it, or in the middle.
    Accuracy need not fall from plan to plan: a layer may break at a width at which the predicted loss does not, and
    prompts are a sample. So what lies between plans that were refused is tried, too, in the middle, and narrowed again
    from a plan that reaches the target. Where a unit is more than `resolution`, plans beside the path follow, which
    take units from one layer after another. Both go on as long as one of the next `search.tries` reaches the target.

    Args:
        fidelity: of a plan on the search split, measured or known.
    Raises:
        AccuracyError: no plan reaches the target; names the best that was measured.
    """
    resolution, tries = search.resolution, search.tries
    steps, tried = path.plans(), list[tuple[float, Plan]]()
    refused = {len(steps)}
    choice = _Choice(steps, 1 - target, resolution)

    def reaches(plan: Plan) -> bool:
        value = fidelity(plan).accuracy
        tried.append((value, plan))
        return value >= target

    def room(low: int, high: int) -> bool:
        """Whether there are plans between two, and the two more than the resolution apart."""
        return high - low > 1 and (low < 0 or choice.gap(low, high) > resolution + COMPRESSION_SLACK)

    def step_reaches(index: int) -> bool:
        reached = reaches(steps[index])
        choice.measured(index, tried[-1][0])
        if not reached:
            refused.add(index)
        return reached

    low: int | None = -1
    reached: Plan | None = None
    while low is not None:
        while room(low, high := min(i for i in refused if i > low)):
            index = choice.next(low, high)
            low = index if step_reaches(index) else low
        if low < 0:
            break
        reached = steps[low]
        gaps = (pair for pair in pairwise(sorted(i for i in refused if i > low)) if room(*pair))
        low = next(filter(step_reaches, (choice.halfway(*pair) for pair in islice(gaps, tries))), None)
    while reached is not None:
        beside = (other for other in path.lighter(reached)[:tries] if other.stored - reached.stored > resolution)
        chosen = next(filter(reaches, beside), None)
        if chosen is None:
            return reached
        reached = chosen
    best, plan = max(tried, key=lambda one: (one[0], one[1].stored), default=(math.nan, None))
    digits = next((n for n in range(4, 9) if round(best, n) < round(target, n)), 9)  # as many as differ
    raise AccuracyError(
        f"accuracy {target} is out of reach: the best measured is {best:.{digits}f}, at compression {plan.stored:.3f}."
        if plan is not None
        else f"accuracy {target} is out of reach: this recipe has no rank plans to measure.",
        "Ask for less, or calibrate with another recipe or with more tokens.",
    )


def plan_for(path: RankPath, removal_rate: float | None, compression: float | None) -> Plan:
    """The plan at a removal rate, or the mildest one that removes at least a share of the cache.

    Raises:
        UsageError: the share cannot be reached at these rank multiples; names the largest that can.
    """
    if removal_rate is not None:
        assert isinstance(path, RemovalRatePath)  # ExportJob.check
        return path.plan(removal_rate)
    assert compression is not None
    plan = path.at_compression(compression)
    if plan is None:
        raise UsageError(
            f"--compression {compression}: the most that can be removed is {path.plans()[-1].stored:.4f}, "
            f"with {path.granularity[0]}.",
            f"Ask for less, or {path.granularity[1]}.",
        )
    return plan
