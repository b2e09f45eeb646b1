"""The part `tiers` of a study: ratios per token against one ratio for all, at equal bytes (ZDC section 5.2, figure 17).

Of a recipe's bases, of which every channel is kept and tiers cut some. Recipes of codes are left out: one plan of codes
beats tiers on top of one (artifacts/NOTES.md).

    rotor study MODEL --recipes zdc --parts artifacts/studies/parts/tiers.py:Tiers -o STUDY
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from rotor.errors import AccuracyError
from rotor.format.file_names import RESULTS
from rotor.policies import Tiers as TiersPolicy
from rotor.policies import read_stored
from rotor.recipe import Recipe
from rotor.rewriting.compressible import CompressibleModel
from rotor.search.probe import full_ranks
from rotor.search.tiers import choose_tiers
from rotor.study.cache_part import CachePart
from rotor.study.caches import CacheRecord
from rotor.study.context import StudyContext
from rotor.study.part import Table, Task, number
from rotor.study.store import StudyStore

LIMIT = 0.1
"""The loss of quality Q_d for which ratios are chosen."""

BY: dict[str, Literal["denominator", "random"]] = {"tiers": "denominator", "tiers at random": "random"}
"""Records of tiers, and what chose their tokens."""

ONE_RATIO, OWN_RANKS = "one ratio", "the recipe's ranks"


class Tiers(CachePart):
    name = "tiers"
    csv = "tiers.csv"
    title = f"Ratios per token at equal bytes, chosen for a Q_d of {LIMIT:g} (ZDC section 5.2)"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in study.plan.recipes.items():
            if recipe.coded:
                study.progress.message(f"{self.name}: {name} has codes, of which one plan beats tiers; left out")
                continue
            choice = f"{self.name}/choices/{name}"
            yield Task(choice, partial(_choice, study, name, recipe), {name: recipe}, points=0)
            for kind in (*BY, ONE_RATIO, OWN_RANKS):
                yield Task(f"{self.name}/{name}: {kind}", partial(_record, study, name, recipe, kind), {name: recipe})

    def tables(self, store: StudyStore) -> Iterator[Table]:
        yield from super().tables(store)
        rows = []
        for name, record in store.part(f"{self.name}/choices").items():
            policy = record["policy"]
            if policy is None:
                rows.append([f"`{name}`", "nothing fits", "", "", ""])
                continue
            g, *_, last = policy["layer_important"] * 2
            ratios = [f"{policy[f'{side}_important']:.2f}, {policy[f'{side}_unimportant']:.2f}" for side in ("qk", "v")]
            rows.append([f"`{name}`", f"{g:.2f} to {last:.2f}", *ratios, number(record["degradation"])])
        if rows:
            yield Table(["recipe", "g", "p_QK of important, others", "p_VW of important, others", "Q_d"], rows)


def _choice(study: StudyContext, name: str, recipe: Recipe) -> dict[str, Any]:
    """The ratios that `rotor export --set cache.tiers=LIMIT` would choose, on the search split."""
    search = study.data.search
    rows = search[: max(1, recipe.cache.tiers_tokens // search.shape[1])]
    compress(study, name, recipe, study.network)
    try:
        policy, loss = choose_tiers(study.network, rows, LIMIT, study.progress)
    except AccuracyError:
        return {"policy": None}
    return {"policy": policy.as_dict(), "degradation": round(loss, 6)}


def _record(study: StudyContext, name: str, recipe: Recipe, kind: str) -> CacheRecord:
    """The chosen tiers, others for tokens by chance, one ratio for all tokens at as many bytes, and the recipe's ranks
    at as many: of the report split, through a cache in the checkpoint's dtype."""
    label, caches, records = f"{name}: {kind}", study.bench, study.store.records
    chosen = records[f"{Tiers.name}/choices/{name}"]["policy"]
    if chosen is None:
        return CacheRecord(label, skipped=f"no ratios cost at most {LIMIT:g} of the perplexity")
    if kind in BY:
        stored = read_stored(chosen, RESULTS)
        assert isinstance(stored, TiersPolicy)
        compress(study, name, recipe, caches.network)
        return caches.record(label, replace(stored, importance=BY[kind]))
    removed = 1 - records[f"{Tiers.name}/{name}: tiers"]["mean_kv_bytes_per_token"] / caches.whole
    if kind == OWN_RANKS:
        return caches.of_plan(label, *study.path(name, recipe), removed)
    compress(study, name, recipe, caches.network, removed)
    return caches.record(label)


def compress(study: StudyContext, name: str, recipe: Recipe, network: CompressibleModel, removed: float = 0.0) -> None:
    """To all channels of the bases, or all but a share of each group's."""
    bases, ranks = list(study.run(name, recipe).bases()), []
    for layer in bases:
        qk, vo = (max(1, round((1 - removed) * rank)) for rank in full_ranks(layer))
        ranks.append([(qk, vo)] * len(layer.qk.encode))
    network.compress(bases, ranks)
