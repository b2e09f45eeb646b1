"""The part `combine` of a study: the most that a recipe, a policy, and both together remove at ACCURACY.

As in the tables of rates of FDC and ZACK. Of both together each removes as much where that can be chosen:
1 - p = (1 - p_dim)(1 - p_tok). Codes have the bits that they have. As in the papers the rate is searched on the data
that it is reported on.

    rotor study MODEL --recipes fdc,zack --parts artifacts/studies/parts/combine.py:Combine -o STUDY
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from rotor.policies import H2O, KIVI, Eviction, Keyformer, KVQuant, Policy, find_policy
from rotor.tools.study.cache_part import GROUP, CachePart, StudiedCache
from rotor.tools.study.caches import CacheRecord
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Task

ACCURACY = 0.99
STEPS = 50
"""Of the share removed, among which the strongest is found by bisection."""

RANDOM = find_policy(f"{Path(__file__).parents[1] / 'random_tokens.py'}:Random")

EVICTING: dict[str, type[Eviction]] = {"Keyformer": Keyformer, "H2O": H2O, "random": type(RANDOM)}

CODES: dict[str, Policy] = {"KVQuant-4": KVQuant(4), "KIVI-4": KIVI(4, GROUP, GROUP)}
"""4 bits, with which the papers keep 99 %."""

Found = Callable[[float], StudiedCache]
"""The cache that removes a share by what can be chosen of it."""


class Combine(CachePart):
    name = "combine"
    title = "The most removed at an accuracy (FDC tables 7 to 11, ZACK tables 8 to 11)"
    text = (
        "By bisection over the share removed, in steps of 0.02, on the text and tasks of this table, as the papers do. "
        "`--set evaluation.metric=text` leaves tasks out."
    )

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, cache in CODES.items():
            yield StudiedCache(name, cache).task(study, f"{self.name}/{name} alone", f"{name} alone")
        searched = {f"{name} alone": alone(name) for name in EVICTING}
        for name, recipe in study.inputs.recipes.items():
            searched |= with_recipe(name, recipe.coded)
        for label, found in searched.items():
            name = f"{label}, at {ACCURACY:g}"
            yield Task(f"{self.name}/{name}", partial(strongest, study, name, found, ACCURACY))


def alone(name: str) -> Found:
    """A method that drops tokens, of the uncompressed model."""
    return lambda removed: StudiedCache(name, EVICTING[name](1 - removed))


def with_recipe(name: str, coded: bool) -> dict[str, Found]:
    """A recipe alone, with what evicts, both equally, and where rows are numbers with codes."""
    found: dict[str, Found] = {f"{name} alone": lambda removed: StudiedCache(name, None, name, removed)}
    for method in EVICTING:
        found[f"{name} and {method}"] = partial(both, name, method)
    if not coded:
        for label, policy in CODES.items():
            found[f"{name} and {label}"] = partial(_coded, name, policy)
    return found


def both(name: str, method: str, removed: float) -> StudiedCache:
    each = equal_contribution(removed)
    return StudiedCache(f"{name} and {method}", EVICTING[method](1 - each), name, each)


def _coded(name: str, policy: Policy, removed: float) -> StudiedCache:
    return StudiedCache(f"{name} and {policy.method}", policy, name, removed)


def equal_contribution(total: float) -> float:
    """Share of each of two ways that remove `total` together: 1 - p = (1 - p_dim)(1 - p_tok) with p_dim = p_tok.

    Source: FDC section 6.4 and ZACK section 6.3 ("contribute equally to the overall compression rate").
    """
    return 1 - (1 - total) ** 0.5


def strongest(study: StudyContext, name: str, found: Found, target: float) -> CacheRecord:
    """The record of the largest share removed whose accuracy is at least `target`."""
    best = most_removed(lambda removed: found(removed).measure(study, name), lambda r: r.accuracy >= target)
    return replace(best[1], name=name) if best else CacheRecord(name, skipped=f"nothing keeps {target:g}")


def most_removed(
    measure: Callable[[float], CacheRecord], fits: Callable[[CacheRecord], bool]
) -> tuple[float, CacheRecord] | None:
    """The largest share removed whose record fits, and that record, by bisection; what fits is taken to end once."""
    low, high, best = 0, STEPS, None
    while high - low > 1:
        middle = (low + high) // 2
        record = measure(middle / STEPS)
        if record.skipped or not fits(record):
            high = middle
        else:
            low, best = middle, (middle / STEPS, record)
    return best
