"""`tiers`: ratios per token against one ratio for all, at equal bytes (ZDC section 5.2).

Of a recipe's bases, of which every column is kept and tiers cut some. Recipes of codes are left out: one plan of codes
beats tiers on top of one (artifacts/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ...errors import AccuracyError
from ...format.file_names import RESULTS
from ...recipe import Recipe
from ...rewriting.compressible import CompressibleModel
from ...policies import Tiers as TiersPolicy
from ...policies import read_stored
from ...search.probe import full_ranks
from ...search.tier_choice import choose_tiers
from ..cache_part import cache_table, csv_row, fidelity_plot
from ..caches import CachedModel, CacheRecord
from ..context import StudyContext
from ..part import Part, Task
from ..records import first_candidates
from ..store import StudyStore
from ..tables import Table, number

LIMIT = 0.1
"""The loss of quality Q_d for which ratios are chosen."""

BY: dict[str, Literal["denominator", "random"]] = {"tiers": "denominator", "tiers at random": "random"}
"""Records of tiers, and what chose their tokens."""

ONE_RATIO, OWN_RANKS = "one ratio", "the recipe's ranks"


class Tiers(Part):
    """Of the recipes in focus."""

    name = "tiers"
    csv = "tiers.csv"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name in study.plan.focus:
            recipe = study.plan.recipes[name]
            if recipe.coded:
                study.progress.message(f"{self.name}: {name} has codes, of which one plan beats tiers; left out")
                continue
            yield Task(f"{self.name}/{name}/choices", partial(_choices, study, name, recipe), {name: recipe}, points=0)
            for kind in (*BY, ONE_RATIO, OWN_RANKS):
                key = f"{self.name}/{name}/records/{_label(kind)}"
                yield Task(key, partial(_record, study, name, recipe, kind), {name: recipe})

    def tables(self, store: StudyStore) -> Iterator[Table]:
        for name in _names(store):
            choices = store.get(f"{self.name}/{name}/choices") or {}
            rows = [_choice_row(limit, choices[limit]["tiers"]) for limit in choices if limit != "measured"]
            if rows:
                header = ["Q_d allowed", "g", "p_QK of important, others", "p_VW of important, others", "Q_d"]
                yield Table(header, rows, f"`{name}`: ratios chosen for a loss of quality, search split")
            title = f"`{name}`: tiers at equal bytes, report split, read through the cache"
            yield cache_table(self._records(store, name), title)

    def rows(self, store: StudyStore) -> Iterator[dict[str, Any]]:
        for name in _names(store):
            yield from ({"recipe": name, **csv_row(record)} for record in self._records(store, name))

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        """What each way of choosing tokens is worth (ZDC figure 17 in shape)."""
        records = [
            replace(record, name=f"{name}: {record.name.partition(', ')[2]}")
            for name in _names(store)
            for record in self._records(store, name)
        ]
        return fidelity_plot(self.name, records, "ratios per token (ZDC section 5.2)")

    def _records(self, store: StudyStore, name: str) -> list[CacheRecord]:
        return [CacheRecord(**record) for record in store.part(f"{self.name}/{name}/records").values()]


def _names(store: StudyStore) -> Iterable[str]:
    return dict.fromkeys(key.partition("/")[0] for key in store.part(Tiers.name))


def _label(kind: str) -> str:
    """The name of a record."""
    return f"Q_d {LIMIT:g}, {kind}"


def _compress(study: StudyContext, name: str, recipe: Recipe, network: CompressibleModel, removed: float = 0.0) -> None:
    """To all columns of the bases, or all but a share of each group's."""
    bases, ranks = first_candidates(study.run(name, recipe)), []
    for layer in bases:
        kept = [max(1, round((1 - removed) * rank)) for rank in full_ranks(layer)]
        ranks.append([(kept[0], kept[1])] * len(layer.qk.encode))
    network.compress(bases, ranks)


def _choices(study: StudyContext, name: str, recipe: Recipe) -> dict[str, Any]:
    """The ratios that `rotor export --set cache.tiers=LIMIT` would choose, on the search split."""
    search, network = study.data.search, study.network
    rows = search[: max(1, recipe.cache.tiers_tokens // search.shape[1])]
    _compress(study, name, recipe, network)
    try:
        policy, loss = choose_tiers(network, rows, LIMIT, recipe.cache.tiers_repeats, study.progress)
    except AccuracyError:
        return {f"{LIMIT:g}": {"tiers": None}}
    return {f"{LIMIT:g}": {"tiers": {"policy": policy.as_dict(), "degradation": round(loss, 6)}}}


def _record(study: StudyContext, name: str, recipe: Recipe, kind: str) -> CacheRecord:
    """The chosen tiers, others for tokens by chance, one ratio for all tokens at as many bytes, and the recipe's ranks
    at as many: of the report split, through a cache in the checkpoint's dtype."""
    label, caches, start = _label(kind), study.caches, f"{Tiers.name}/{name}"
    chosen = study.store.records[f"{start}/choices"][f"{LIMIT:g}"]["tiers"]
    if chosen is None:
        return CacheRecord(label, skipped=f"no ratios cost at most {LIMIT:g} of the perplexity")
    policy = None
    if kind in BY:
        stored = read_stored(chosen["policy"], RESULTS)
        assert isinstance(stored, TiersPolicy)
        policy, removed = replace(stored, importance=BY[kind]), 0.0
    else:
        tiers = study.store.records[f"{start}/records/{_label('tiers')}"]
        removed = 1 - tiers["mean_kv_bytes_per_token"] / caches.whole
    if kind == OWN_RANKS:
        return caches.of_plan(label, *study.path(name, recipe), removed)
    _compress(study, name, recipe, caches.network, removed)
    return caches.record(label, CachedModel(caches.network, policy, compressed=True))


def _choice_row(limit: str, chosen: dict[str, Any] | None) -> list[str]:
    if chosen is None:
        return [limit, "nothing fits", "", "", ""]
    policy = chosen["policy"]
    shares = policy["layer_important"]
    ratios = [f"{policy[f'{side}_important']:.2f}, {policy[f'{side}_unimportant']:.2f}" for side in ("qk", "v")]
    return [limit, f"{shares[0]:.2f} to {shares[-1]:.2f}", *ratios, number(chosen["degradation"])]
