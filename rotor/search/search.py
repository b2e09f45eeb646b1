"""F_p: from an accuracy to the ranks that keep it, by measuring points of a path of rank plans.

A target alone decides which plans are measured: a bisection over what they save, by the search split. What was measured
before only saves time, so that the same request leads to the same point, whatever else the table holds.

Source: FDC section 5.2 (the function F_p).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice, pairwise

from ..calibration.allocation.plan import COMPRESSION_SLACK, Plan, RankPath
from ..calibration.allocation.removal_rate import RemovalRatePath
from ..errors import AccuracyError, UsageError
from ..recipe.sections import Search
from .evaluation.accuracy import Fidelity


def find_plan(
    path: RankPath,
    search: Search,
    target: float,
    fidelity: Callable[[Plan], Fidelity],
) -> Plan:
    """The plan that a target leads to, by bisection over what plans save.

    The first plan is in the middle of the path; each next one halves what lies between the last that reached the
    target and the last that did not, until they are `search.resolution` apart or neighbours. Accuracy need not fall
    from plan to plan: a layer may break at a width at which the predicted loss does not, and prompts are a sample.
    So what lies between plans that were refused is tried, too, in the middle, and halved again from a plan that
    reaches the target. Where a unit is more than `resolution`, plans beside the path follow, which take units from
    one layer after another. Both go on as long as one of the next `search.tries` reaches the target.

    Args:
        fidelity: of a plan on the search split, measured or known.
    Raises:
        AccuracyError: no plan reaches the target; names the best that was measured.
    """
    resolution, tries = search.resolution, search.tries
    steps, tried = path.plans(), list[tuple[float, Plan]]()
    refused = {len(steps)}

    def reaches(plan: Plan) -> bool:
        value = fidelity(plan).accuracy
        tried.append((value, plan))
        return value >= target

    def room(low: int, high: int) -> bool:
        """Whether there are plans between two, and the two more than the resolution apart."""
        if high - low < 2 or low < 0:
            return high - low > 1
        return steps[min(high, len(steps) - 1)].stored - steps[low].stored > resolution + COMPRESSION_SLACK

    def middle_reaches(low: int, high: int) -> int | None:
        """The plan halfway between two, or the mildest of few that are left; None where it is refused."""
        begin, end = steps[max(low, 0)].stored, steps[min(high, len(steps) - 1)].stored
        halfway = begin if end - begin <= resolution + COMPRESSION_SLACK else (begin + end) / 2
        middle = min(range(low + 1, high), key=lambda i: abs(steps[i].stored - halfway))
        if reaches(steps[middle]):
            return middle
        refused.add(middle)
        return None

    low: int | None = -1
    reached: Plan | None = None
    while low is not None:
        while room(low, high := min(i for i in refused if i > low)):
            middle = middle_reaches(low, high)
            low = low if middle is None else middle
        if low < 0:
            break
        reached = steps[low]
        gaps = (pair for pair in pairwise(sorted(i for i in refused if i > low)) if room(*pair))
        low = next((m for m in (middle_reaches(*pair) for pair in islice(gaps, tries)) if m is not None), None)
    while reached is not None:
        beside = (other for other in path.lighter(reached)[:tries] if other.stored - reached.stored > resolution)
        chosen = next(filter(reaches, beside), None)
        if chosen is None:
            return reached
        reached = chosen
    best, plan = max(tried, key=lambda one: (one[0], one[1].stored), default=(math.nan, None))
    raise AccuracyError(
        f"accuracy {target} is out of reach: the best measured is {best:.4f}, at compression {plan.stored:.3f}."
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
