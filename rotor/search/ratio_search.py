"""ZDC's ratios: g and the p of important and of other tokens that keep the accuracy that is asked.

Ranks stay at their mildest, as what is removed is removed token by token. For one g, and one proportion of the four p,
the p are scaled together and found by the bisection that finds ranks. Then other g, g that rises with the layers, and
lighter ratios of values are tried: each is measured once, just above what the best one removes, and the bisection goes
on along the most accurate one, if that keeps what is asked.

Source: ZDC section 5.2, equations 5 and 6. There a regression model learns what an enumeration found: `ratio_grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..calibration.allocation.plan import COMPRESSION_SLACK, Plan, RankPath
from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.sizes import share_removed, uncompressed_kv_bytes_per_token
from ..recipe.sections import Search
from .evaluation.accuracy import Fidelity
from .plan_choice import find_plan

if TYPE_CHECKING:
    from ..policies import Tiers

SHARES = (0.2, 0.4, 0.6, 0.8)
"""Shares of important tokens that are tried."""

RISES = (0.2, 0.4)
"""Differences of the last layer's share to the first one's, around the best share."""

LIGHTER = 0.5
"""Ratios of values over those that were given, tried last."""

LARGEST = 0.9
"""The largest ratio that is tried."""

STEPS = 36
"""Scales of the ratios, up to LARGEST."""


@dataclass(frozen=True)
class RatioPlan(Plan):
    """A plan of ranks whose rows lose channels by a policy; `stored` counts both."""

    policy: Tiers | None = None


@dataclass(frozen=True)
class Cache:
    """Make-up of the rows of a plan: its layouts, the model's sizes, and bytes of a number."""

    plan: Plan
    layouts: Sequence[LayerLayout]
    shape: AttentionShape
    element_bytes: int

    def with_ratios(self, policy: Tiers) -> RatioPlan:
        whole = uncompressed_kv_bytes_per_token(self.shape, self.element_bytes)
        stored = share_removed(whole, policy.bytes_per_token(self.layouts, self.element_bytes))
        p = self.plan
        return RatioPlan(p.parameter, p.planned, stored, p.unrounded, p.ranks, p.channels, policy=policy)


class RatioPath(RankPath):
    """The scales of a policy's ratios.

    Args:
        above: plans that remove no more are left out.
    """

    granularity = "whole channels", "ask for less"

    def __init__(self, cache: Cache, policy: Tiers, above: float = 0.0) -> None:
        self.cache, self.policy, self.above = cache, policy, above

    def _plans(self) -> list[Plan]:
        largest = max(self.policy.qk_unimportant, self.policy.v_unimportant)
        scales = [LARGEST / largest * step / STEPS for step in range(1, STEPS + 1)] if largest else []
        plans: list[Plan] = [self.cache.with_ratios(self.policy.scaled(scale)) for scale in scales]
        return [plan for plan in plans if plan.stored > self.above + COMPRESSION_SLACK]


def find_ratios(
    cache: Cache, policy: Tiers, target: float, search: Search, measure: Callable[[RatioPlan], Fidelity]
) -> Tiers:
    """The ratios that remove most of those that keep the accuracy.

    Args:
        policy: where the search begins: its g, and its ratios in their proportion.
        search: how plans are searched; they differ by its resolution at least.
        measure: fidelity of a plan on the search split.
    Raises:
        AccuracyError: no ratios keep the accuracy.
    """

    def fidelity(plan: Plan) -> Fidelity:
        assert isinstance(plan, RatioPlan)
        return measure(plan)

    best = find_plan(RatioPath(cache, policy), search, target, fidelity)
    assert isinstance(best, RatioPlan)
    for change in (_other_shares, rising_shares, _lighter_values):
        assert best.policy is not None
        paths = [
            RatioPath(cache, other, best.stored + search.resolution)
            for other in change(best.policy, len(cache.layouts))
        ]
        kept = [(fidelity(path.plans()[0]).accuracy, path) for path in paths if path.plans()]
        accuracy, path = max(kept, key=lambda one: one[0], default=(-1.0, None))
        if path is not None and accuracy >= target:
            best = find_plan(path, search, target, fidelity)
            assert isinstance(best, RatioPlan)
    assert best.policy is not None
    return replace(best.policy, search=False)


def _other_shares(policy: Tiers, layers: int) -> Iterator[Tiers]:
    for share in SHARES:
        if policy.shares(layers) != (share,) * layers:
            yield replace(policy, important=share, layer_important=())


def rising_shares(policy: Tiers, layers: int) -> Iterator[Tiers]:
    """Deeper layers have more important tokens (observation O3)."""
    if layers == 1 or policy.layer_important:
        return
    for rise in RISES:
        steps = [policy.important + rise * (layer / (layers - 1) - 0.5) for layer in range(layers)]
        yield replace(policy, layer_important=tuple(round(min(1.0, max(0.0, share)), 4) for share in steps))


def _lighter_values(policy: Tiers, layers: int) -> Iterator[Tiers]:
    """Queries and keys have more dimensions to drop than values."""
    del layers
    yield replace(policy, v_important=LIGHTER * policy.v_important, v_unimportant=LIGHTER * policy.v_unimportant)
