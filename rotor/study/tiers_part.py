"""The part `tiers` of a study: ratios per token against one ratio (ZDC section 5.2 and its figures 6 to 8, 24, 25)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..bases.layer import LayerBases
from ..calibration.run import Run
from ..format.file_names import RESULTS
from ..policies import H2O, EvictingLayer, Policy, Tiers, read_stored
from ..recipe import Recipe
from ..rewriting.compressible import CompressibleModel
from ..search.probe import full_ranks
from ..search.tier_choice import RatioRegression, Tried, with_leaders, within
from ..search.tier_grid import LEVELS, RATIOS, TierGrid, TierMeter, degradation
from ..search.tier_repeats import by_average_score, by_denominator, importances, repetition
from .cache_bench import PolicyModel
from .peers import PeerRecord
from .peers_part import PeersPart
from .tiers_codes import PART, CodedTiers

LIMITS = (0.02, 0.05, 0.1, 0.2)
"""Q_d for which ratios are chosen."""

COMPARED = (0.1,)
"""Of these, those at which tiers are compared with one ratio at equal bytes."""

SET_SHARE = 0.35
"""Of the tokens that are called most, or least, important (ZDC section 3.3)."""

IMPORTANT = (0.4, 0.7)
"""p^i and p^u where g is varied (ZDC section 6.6)."""

STEP = 16
"""Tokens of a step where many choices are measured; they see each other's whole rows."""

BY: dict[str, Literal["denominator", "mean", "random"]] = {
    "tiers": "denominator",
    "tiers by denominator over keys": "mean",
    "tiers at random": "random",
}
"""Records of tiers, and what chose their tokens."""

THRESHOLD = 0.95
"""ZDC's, of repetition."""


@dataclass(frozen=True)
class Spread(H2O):
    """Keeps every token, and scores it as a query by how far its logits spread, the largest less the smallest, in the
    head where they spread most."""

    share: float = 1.0
    scope: Literal["group", "layer"] = "layer"

    def scored(self, layer: EvictingLayer, weights: Tensor) -> Tensor:
        logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
        return (logs.amax(-1) - logs.masked_fill(weights == 0, torch.inf).amin(-1)).amax(2)


class TiersPart(PeersPart):
    """Measures what the store does not have yet; raises as PeersPart."""

    def measure(self, name: str, recipe: Recipe, run: Callable[[], Run]) -> None:
        """All of the part for a recipe's bases, of which every column is kept and tiers cut some; of codes, CodedTiers.

        Args:
            run: gives the recipe's calibration.
        """
        if recipe.coded:
            CodedTiers(self).measure(name, recipe, run)
            return
        parts = ("layers", "grid", "shares", "ratios", "choices", *(f"records/{label}" for label in labels()))
        if all(self.store.get(f"{PART}/{name}/{part}") for part in parts):
            return
        own = _Recipe(self, name, recipe, run())
        own.layers()
        grid = own.grid()
        own.sweeps(grid)
        own.records(grid, own.choices(grid))


class _Recipe:
    """The measurements of one recipe.

    Choices are made on the search split, in float32 where the study is; records are of the report split, through a
    cache in the checkpoint's dtype.
    """

    def __init__(self, part: TiersPart, name: str, recipe: Recipe, run: Run) -> None:
        self.part, self.name, self.recipe, self.run = part, name, recipe, run
        self.store, self.progress = part.store, part.subject.progress
        self.bases: list[LayerBases] = [next(iter(layer.values())) for layer in run.bases()]
        search = part.subject.data.search
        self.rows = search[: max(1, recipe.cache.tiers_tokens // search.shape[1])]
        self.network = part.subject.network
        self._compressed(self.network)
        self.meter = TierMeter(self.network, self.rows)

    def layers(self) -> None:
        """Repetition between layers by three measures of importance, and the spread of logits by layer."""
        key = f"{PART}/{self.name}/layers"
        if self.store.get(key):
            return
        measures: dict[str, Policy] = {
            "denominator": by_denominator(),
            "denominator over keys": Tiers(important=1.0, importance="mean"),
            "average score": by_average_score(),
        }
        record: dict[str, Any] = {"share": SET_SHARE, "repetition": {}}
        for measure, policy in measures.items():
            found = importances(self.network, self.rows, policy)
            both = {"most": repetition(found, SET_SHARE, True), "least": repetition(found, SET_SHARE, False)}
            record["repetition"][measure] = {which: matrix.round(4).tolist() for which, matrix in both.items()}
        record["spread"] = self._spreads()
        self.store.put(key, record)

    def _spreads(self) -> list[dict[str, float]]:
        """Quantiles over queries of how far their logits spread, by layer."""
        found = importances(self.network, self.rows, Spread())[..., 1:]  # the first query sees one key
        marks = {"median": 0.5, "p90": 0.9, "largest": 1.0}
        return [{name: round(float(np.quantile(layer, q)), 3) for name, q in marks.items()} for layer in found]

    def grid(self) -> TierGrid:
        """Each layer and side cut alone."""
        key, sizes = f"{PART}/{self.name}/grid", tuple(self.meter.row_bytes)
        known = self.store.get(key)
        if known is None:
            cells = TierGrid.cells(len(sizes))
            with self.progress.task(f"{PART}: {self.name}", cells, "cells") as advance:
                found = TierGrid.measure(self.meter, advance)
            known = self.store.put(key, {"costs": found.costs.round(7).tolist()})
        return TierGrid(np.array(known["costs"]), sizes)

    def sweeps(self, grid: TierGrid) -> None:
        """g at fixed ratios (figure 24), and p of one side for all tokens (figure 25)."""
        important, unimportant = IMPORTANT
        shares = {g: Tiers(g, (), important, unimportant, important, unimportant) for g in LEVELS[1:]}
        self._swept("shares", grid, {f"{g:g}": policy for g, policy in shares.items()})
        ratios = {
            f"{side} {p:g}": Tiers(**{"important": 0.0, f"{side}_unimportant": p, f"{other}_unimportant": 0.0})  # type: ignore[arg-type]
            for side, other in (("qk", "v"), ("v", "qk"))
            for p in LEVELS[1:]
        }
        self._swept("ratios", grid, ratios)

    def _swept(self, what: str, grid: TierGrid, policies: dict[str, Tiers]) -> None:
        key = f"{PART}/{self.name}/{what}"
        if self.store.get(key):
            return
        found = {
            label: {"removed": grid.removed(policy), "degradation": degradation(self.meter.cost(policy, STEP))}
            for label, policy in policies.items()
        }
        self.store.put(key, found)

    def choices(self, grid: TierGrid) -> dict[str, Any]:
        """Near-optimal ratios at each of LIMITS, what a regression fitted to the other limits predicts there, and the
        Oracle: the best that was measured, whatever led to it."""
        key = f"{PART}/{self.name}/choices"
        known = self.store.get(key)
        if known is not None:
            return known
        found = importances(self.network, self.rows, by_denominator())
        candidates, every = grid.candidates(), dict[Tiers, Tried]()

        def measured(policy: Tiers) -> Tried:
            policy = with_leaders(policy, found, THRESHOLD)
            if policy not in every:
                every[policy] = Tried(policy, degradation(self.meter.cost(policy, STEP)))
                found_of = f"{grid.removed(policy):.3f} of the rows removed, Q_d {every[policy].degradation:.4f}"
                self.progress.message(f"{PART}: {self.name}: {found_of}")
            return every[policy]

        def best(tried: Sequence[Tried], limit: float) -> Tried | None:
            fitting = [one for one in tried if one.degradation <= limit]
            return max(fitting, key=lambda one: grid.removed(one.policy), default=None)

        kinds = {
            "tiers": candidates.tiered(),
            "tiers, keys lose more": candidates.tiered().ordered(),
            "g alike": candidates.tiered(alike=True),
            "one ratio": candidates.one_ratio(),
        }
        by_kind = {
            kind: {limit: best(within(among, limit, measured), limit) for limit in LIMITS}
            for kind, among in kinds.items()
        }
        near = {limit: tried.policy for limit, tried in by_kind["tiers"].items() if tried is not None}
        predicted: dict[float, Tried] = {}
        for limit in near:
            others = [other for other in near if other != limit]
            if len(others) > 1:
                predicted[limit] = measured(RatioRegression(others, [near[other] for other in others]).predict(limit))
        record: dict[str, Any] = {"measured": len(every)}
        for limit in LIMITS:
            oracle = best(list(every.values()), limit)
            row = {kind: by_limit[limit] for kind, by_limit in by_kind.items()}
            row |= {"regression": predicted.get(limit), "oracle": oracle}
            record[f"{limit:g}"] = {
                kind: None if one is None else self._described(one, grid) for kind, one in row.items()
            }
        return self.store.put(key, record)

    def _described(self, tried: Tried, grid: TierGrid) -> dict[str, Any]:
        return {
            "policy": tried.policy.as_dict(),
            "removed": round(grid.removed(tried.policy), 5),
            "degradation": round(tried.degradation, 6),
            "predicted": round(degradation(grid.predicted(tried.policy)), 6),
        }

    def records(self, grid: TierGrid, choices: dict[str, Any]) -> None:
        """The tiers chosen at each of COMPARED, tokens by chance or by another measure in their place, one ratio for
        all tokens at as many bytes, and the recipe's own ranks at as many."""
        for limit in COMPARED:
            chosen = choices[f"{limit:g}"]["tiers"]
            for label in labels([limit]):
                key = f"{PART}/{self.name}/records/{label}"
                if self.store.get(key) is not None:
                    continue
                if chosen is None:
                    self._keep(key, PeerRecord(label, skipped=f"no ratios cost at most {limit:g} of the perplexity"))
                    continue
                policy = read_stored(chosen["policy"], RESULTS)
                assert isinstance(policy, Tiers)
                self._keep(key, self._compared(label.rpartition(", ")[2], label, policy, grid, f"{limit:g}"))

    def _compared(self, kind: str, label: str, policy: Tiers, grid: TierGrid, limit: str) -> PeerRecord:
        bench, network = self.part._bench(), self.part._in_checkpoint_dtype()
        if kind in BY:
            self._compressed(network)
            found = bench.policy(label, PolicyModel(network, replace(policy, importance=BY[kind]), compressed=True))
            self._compressed(self.network)
            return found
        tiers = self.store.get(f"{PART}/{self.name}/records/Q_d {limit}, tiers")
        assert tiers is not None
        removed = 1 - tiers["mean_kv_bytes_per_token"] / self.part._whole
        if kind == "one ratio":
            self._compressed(network, *one_ratio(grid, removed))
        else:
            plan = self._path.at_compression(removed)
            if plan is None:
                return PeerRecord(label, skipped="out of the ranks' reach")
            network.compress(plan.select(self.run.bases()), plan.rounded)
        found = bench.checkpoint(label, network.model)
        self._compressed(self.network)
        return found

    @property
    def _path(self) -> Any:
        measurer = self.part.subject.measurer(self.run, self.recipe)
        return measurer.path(self.recipe)

    def _compressed(self, network: CompressibleModel, qk_ratio: float = 0.0, v_ratio: float = 0.0) -> None:
        """All columns of the bases, or all but a share of each group's."""
        ranks = []
        for layer in self.bases:
            qk, v = full_ranks(layer)
            cut = max(1, round((1 - qk_ratio) * qk)), max(1, round((1 - v_ratio) * v))
            ranks.append([cut] * len(layer.qk.encode))
        network.compress(self.bases, ranks)

    def _keep(self, key: str, record: PeerRecord) -> None:
        self.store.put(key, asdict(record))
        found = record.skipped or f"{record.mean_kv_bytes_per_token:.1f} bytes a token, KL {record.kl_div:.5f}"
        self.progress.message(f"{PART}: {self.name}: {record.name}: {found}")


def labels(limits: Sequence[float] = COMPARED) -> list[str]:
    """Names of the records."""
    return [f"Q_d {limit:g}, {kind}" for limit in limits for kind in (*BY, "one ratio", "the recipe's ranks")]


def one_ratio(grid: TierGrid, removed: float) -> tuple[float, float]:
    """The ratios of keys and of values that remove a share of the rows' bytes at the least predicted cost: those of
    which neither is beyond the largest that was measured, or both alike."""
    sizes = np.array(grid.row_bytes, dtype=float).sum(0)
    pairs = [(removed, removed)]
    for v in np.linspace(0.0, 0.95, 96):
        qk = (removed * sizes.sum() - v * sizes[1]) / sizes[0]
        if qk >= 0 and max(qk, v) <= RATIOS[-1] + 1e-9:
            pairs.append((float(qk), float(v)))

    def cost(pair: tuple[float, float]) -> float:
        return grid.predicted(Tiers(important=0.0, qk_unimportant=pair[0], v_unimportant=pair[1]))

    return min(pairs, key=cost)
