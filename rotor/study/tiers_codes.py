"""The part `tiers` of a study for recipes of codes: fewer nibbles for unimportant tokens, at equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from ..calibration.run import Run
from ..policies import Policy, Tiers
from ..recipe import Recipe
from .cache_bench import PolicyModel
from .peers import PeerRecord
from .peers_part import PeersPart

PART = "tiers"

STAND = (0.8,)
"""Shares of the uncompressed cache that the plans of codes remove on which tiers stand."""

IMPORTANT = 0.5
"""g."""

RATIO = 0.4
"""p^u of keys and of values."""

PLAN = "one plan"
TIERS = "tiers"
ALIKE = "nibbles of all tokens"


def policies() -> dict[str, Tiers]:
    """Tiers by what chose the tokens."""
    tiers = Tiers(important=IMPORTANT, qk_unimportant=RATIO, v_unimportant=RATIO)
    every = RATIO * (1 - IMPORTANT)
    return {
        TIERS: tiers,
        f"{TIERS}, tokens at random": replace(tiers, importance="random"),
        ALIKE: Tiers(important=0.0, qk_unimportant=every, v_unimportant=every),
    }


def coded_labels() -> list[str]:
    """Names of the records."""
    return [_label(removed, kind) for removed in STAND for kind in (*policies(), PLAN)]


def _label(removed: float, kind: str) -> str:
    return f"codes of {removed:g} removed, {kind}"


class CodedTiers:
    """Measures what the store does not have yet; the last of the records at each share is the plan of codes that takes
    as many bytes as the tiers, everything counted."""

    def __init__(self, part: PeersPart) -> None:
        self.part, self.store, self.progress = part, part.store, part.subject.progress

    def measure(self, name: str, recipe: Recipe, run: Callable[[], Run]) -> None:
        """Args:
        run: gives the recipe's calibration.
        """
        keys = {label: f"{PART}/{name}/records/{label}" for label in coded_labels()}
        if all(self.store.get(key) for key in keys.values()):
            return
        measurer = self.part.subject.measurer(run(), recipe)
        path, bench, network = measurer.path(recipe), self.part._bench(), self.part._in_checkpoint_dtype()

        def compressed(removed: float) -> str:
            plan = path.at_compression(removed)
            if plan is None:
                return f"out of reach: at most {path.steps()[-1].stored:.3f} is removed"
            network.compress(plan.select(measurer.bases), plan.rounded)
            return ""

        for removed, kind, policy in _wanted():
            label = _label(removed, kind)
            if self.store.get(keys[label]) is not None:
                continue
            if policy is None:
                tiers = self.store.get(keys[_label(removed, TIERS)])
                assert tiers is not None
                removed = 1 - tiers["mean_kv_bytes_per_token"] / self.part._whole
            skipped = compressed(removed)
            if skipped:
                record = PeerRecord(label, skipped=skipped)
            elif policy is None:
                record = bench.checkpoint(label, network.model)
            else:
                record = bench.policy(label, PolicyModel(network, policy, compressed=True))
            self._keep(keys[label], record)

    def _keep(self, key: str, record: PeerRecord) -> None:
        data: dict[str, Any] = asdict(record)
        self.store.put(key, data)
        found = record.skipped or f"{record.mean_kv_bytes_per_token:.1f} bytes a token, KL {record.kl_div:.5f}"
        self.progress.message(f"{key}: {found}")


def _wanted() -> Iterator[tuple[float, str, Policy | None]]:
    for removed in STAND:
        for kind, policy in policies().items():
            yield removed, kind, policy
        yield removed, PLAN, None
