"""`combine`: a recipe's rows with a policy on top, both removing as much, and each alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ...policies import GEAR, KIVI, Eviction, KVQuant, Policy
from ..cache_part import CONTROL, GROUP, CachePart, cache_records, evictions
from ..caches import CacheRecord
from ..context import TARGETS, StudyContext
from ..part import Task
from ..store import StudyStore
from ..tables import Table

ON_TOP = ("Keyformer", "H2O", "random")
"""What evicts on top of compressed rows."""

TOTALS = (0.5, 0.75)
"""Shares of the cache removed by two ways together."""

CACHE_PARTS = ("quantise", "evict", "budgets", "combine")


class Combine(CachePart):
    name = "combine"
    title = "Compressed rows and a policy on top (FDC and ZACK: 1 - p = (1 - p_dim)(1 - p_tok))"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        alone: dict[str, Policy] = dict(CONTROL)
        for total in TOTALS:
            kept = evictions(1 - total)
            alone |= {f"{name} alone, {total:g} removed": kept[name] for name in ON_TOP}
        yield from self.of_policies(study, alone)
        for name, recipe in study.plan.recipes.items():
            for label, (removed, policy) in combinations(name, recipe.coded).items():
                measure = partial(self.of_recipe, study, label, recipe, removed, policy)
                yield Task(f"{self.name}/{label}", measure, {name: recipe})

    def tables(self, store: StudyStore) -> Iterator[Table]:
        """Of all parts about policies, too, what takes the fewest bytes."""
        yield from super().tables(store)
        every = [record for part in CACHE_PARTS for record in cache_records(store, part)]
        if every:
            yield Table(
                ["accuracy", "fewest bytes, complete row", "bytes", "fewest bytes, 32K tokens", "bytes at 32K tokens"],
                best_mixtures(every),
                "Of all these, the fewest bytes at an accuracy: the smallest of a row's ratios",
            )


def equal_contribution(total: float) -> float:
    """What each of two ways removes to remove `total` together: 1 - p = (1 - p_dim)(1 - p_tok) with p_dim = p_tok.

    Source: FDC section 6.3 and ZACK section 8.3 ("contribute equally to the overall compression rate").
    """
    return 1 - (1 - total) ** 0.5


def combinations(name: str, coded: bool) -> dict[str, tuple[float, Policy | None]]:
    """By label, the share that a recipe's rows remove, and the policy on top: tokens kept by a share, and where rows
    are numbers, codes, or both at once.

    Args:
        coded: whether the recipe's rows are codes, of which no more are made.
    """
    found: dict[str, tuple[float, Policy | None]] = {}
    for total in TOTALS:
        each = equal_contribution(total)
        kept, coded_kept = evictions(1 - each), evictions(1 - each, bits=4)
        on_top: dict[str, Policy] = {method: kept[method] for method in ON_TOP}
        if not coded:
            on_top |= {f"{method} at {each:.2f} with 4 bits": coded_kept[method] for method in ON_TOP} | CONTROL
            on_top |= {"KIVI-4": KIVI(4, GROUP, GROUP), "GEAR KCVT-4": GEAR(4), "KVQuant-4": KVQuant(4)}
        found[f"{name} alone, {total:g} removed"] = total, None
        for label, policy in on_top.items():
            # What is coded removes more than the total.
            alike = isinstance(policy, Eviction) and policy.bits == 16
            together = f"{name} and {label}, {total:g} removed"
            found[together if alike else f"{name} at {each:.2f} and {label}"] = each, policy
    return found


def best_mixtures(records: Sequence[CacheRecord]) -> list[list[str]]:
    """At each accuracy what takes fewest bytes a token, of a complete row and of a long context."""
    rows = []
    for target in TARGETS:
        fitting = [record for record in records if not record.skipped and record.accuracy >= target]
        cells = [f"{target:g}"]
        for size in ("kv_bytes_per_token", "long_kv_bytes_per_token"):
            best = min(fitting, key=lambda record: getattr(record, size), default=None)
            cells += ["none measured", ""] if best is None else [best.name, f"{getattr(best, size):.1f}"]
        rows.append(cells)
    return rows
