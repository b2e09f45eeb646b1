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
from .expected_loss import ExpectedLoss


def find_plan(
    path: RankPath,
    search: Search,
    target: float,
    fidelity: Callable[[Plan], Fidelity],
) -> Plan:
    """The plan that a target leads to.

    Where plans have predicted losses it is the one that is expected to keep the target on other text too, by all that
    were measured (see `by_expected_loss`); elsewhere it is found by bisection. Where a unit is more than
    `search.resolution`, plans beside the path follow, which take units from one layer after another, as long as one of
    the next `search.tries` reaches the target.

    Args:
        fidelity: of a plan on the search split, measured or known.
    Raises:
        AccuracyError: no plan reaches the target; names the best that was measured.
    """
    steps, tried = path.plans(), list[tuple[float, Plan]]()

    def measure(plan: Plan) -> Fidelity:
        measured = fidelity(plan)
        tried.append((measured.accuracy, plan))
        return measured

    def reaches(plan: Plan) -> bool:
        return measure(plan).accuracy >= target

    if target < 1 and all(step.loss for step in steps):
        reached = by_expected_loss(steps, search.resolution, target, measure)
    else:
        reached = by_bisection(steps, search, reaches)
    while reached is not None:
        lighter = path.lighter(reached)[: search.tries]
        beside = (other for other in lighter if other.stored - reached.stored > search.resolution)
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


def by_expected_loss(
    steps: Sequence[Plan], resolution: float, target: float, measure: Callable[[Plan], Fidelity]
) -> Plan | None:
    """The plan that removes most of those that are expected to keep the target; None where none is measured to.

    Of several plans that just reach a target on one sample of text, the one that removes most is the luckiest. So a
    curve through all that were measured decides, by a margin (see `ExpectedLoss`), and the plan that it leads to has to
    reach the target itself. The search ends at a plan that was measured before, or within a quarter of `resolution` of
    one that reached the target; or within `resolution` of one and, to a quarter of that, still chosen once measured.
    """
    expected = ExpectedLoss([step.loss or 0.0 for step in steps], 1 - target)
    stored = np.array([step.stored for step in steps])
    low, high = -1, len(steps)  # the last plan that reached the target, and the first that did not
    halved = math.inf
    while (index := expected.choice(high)) is not None:
        gap = stored[high] - stored[low] if low >= 0 and high < len(steps) else math.inf
        wrong = gap > halved if index > low else index == low and not expected.explains(low)
        if index >= low and gap <= resolution + COMPRESSION_SLACK:
            index = low  # what lies above is the resolution
        elif wrong and high - low > 1 and math.isfinite(gap):
            index = low + 1 + int(np.abs(stored[low + 1 : high] - (stored[low] + stored[high]) / 2).argmin())
        if index in expected.measured:
            return steps[index]
        if low >= 0 and abs(stored[index] - stored[low]) <= resolution / 4:
            return steps[low]
        halved = gap / 2 if math.isfinite(gap) else math.inf
        near = any(abs(stored[index] - stored[other]) <= resolution for other in expected.measured)
        measured = measure(steps[index])
        expected.add(index, measured)
        if measured.accuracy < target:
            high, low = index, low if low < index else -1
            continue
        low = max(low, index)
        if near and stored[index] - stored[expected.choice(high) or 0] <= resolution / 4:
            return steps[index]
    return None


def by_bisection(steps: Sequence[Plan], search: Search, reaches: Callable[[Plan], bool]) -> Plan | None:
    """The plan between one that reaches a target and one that does not; None where none reaches it.

    Each plan that is measured lies in the middle between the last that reached the target and the last that did not,
    until they are `search.resolution` apart or neighbours. Accuracy need not fall from plan to plan: a layer may break
    at a width at which others do not, and prompts are a sample. So what lies between plans that were refused is tried,
    too, and halved again from a plan that reaches the target, as long as one of the next `search.tries` does.
    """
    resolution = search.resolution
    refused = {len(steps)}

    def gap(low: int, high: int) -> float:
        """Plan between two, by what they save; below the first and above the last there is nothing."""
        return steps[min(high, len(steps) - 1)].stored - steps[max(low, 0)].stored

    def room(low: int, high: int) -> bool:
        """Tell whether there are plans between two, and the two more than the resolution apart."""
        return high - low > 1 and (low < 0 or gap(low, high) > resolution + COMPRESSION_SLACK)

    def halfway(low: int, high: int) -> int:
        """The plan halfway between two, or the mildest of few that are left."""
        begin, width = steps[max(low, 0)].stored, gap(low, high)
        middle = begin if width <= resolution + COMPRESSION_SLACK else begin + width / 2
        return min(range(low + 1, high), key=lambda i: abs(steps[i].stored - middle))

    def step_reaches(index: int) -> bool:
        reached = reaches(steps[index])
        if not reached:
            refused.add(index)
        return reached

    low: int | None = -1
    reached = None
    while low is not None:
        while room(low, high := min(i for i in refused if i > low)):
            index = halfway(low, high)
            low = index if step_reaches(index) else low
        if low < 0:
            break
        reached = steps[low]
        gaps = (pair for pair in pairwise(sorted(i for i in refused if i > low)) if room(*pair))
        low = next(filter(step_reaches, (halfway(*pair) for pair in islice(gaps, search.tries))), None)
    return reached


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
