"""F_p: the measured table from accuracy to ranks, and the choice of a point in it.

Every point is compressed in memory and measured on both splits, once; the table is kept in the run folder. A point is
chosen by the search split alone; the report split may only veto it, so that what is written meets its target there too.

Source: FDC section 5.2 (the function F_p).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from .bases import LayerBases
from .compress import CompressibleModel
from .errors import AccuracyError, UsageError
from .evaluation import EvaluationData, Scores, batch_logits, ratios, score
from .metrics import accuracy_field, make_metric
from .progress import Progress
from .ranks import RankPath, RankPlan
from .recipe import Recipe
from .run import Run

TABLE_VERSION = 1


def rank_path(bases: list[LayerBases], run: Run, recipe: Recipe) -> RankPath:
    """All rank plans that the recipe's rank method can give for these bases."""
    spectra = [(layer.qk.singular_values, layer.vo.singular_values) for layer in bases]
    return RankPath(spectra, run.shape, recipe.ranks.multiple_of, recipe.ranks.spectrum == "squares")


@dataclass
class RankTable:
    """The measured points of a run under one evaluation and rank setting, by stored compression.

    points: one dict a point: removal_rate, compression, ranks, and `search` and `report` measurements.
    """

    run: Run
    recipe: Recipe
    fingerprint: str
    points: list[dict[str, Any]]
    complete: bool
    base: dict[str, Any] | None = None

    @classmethod
    def open(cls, run: Run, recipe: Recipe) -> RankTable:
        """The table in the run folder, or an empty one if there is none that fits the recipe's settings."""
        settings = recipe.to_dict()
        relevant = json.dumps([settings["ranks"], settings["evaluation"], run.info["model"]["shards"]], sort_keys=True)
        fingerprint = hashlib.sha256(relevant.encode()).hexdigest()
        data = run.read_rank_table()
        if data and data.get("version") == TABLE_VERSION and data.get("fingerprint") == fingerprint:
            complete = bool(data["complete"]) and data.get("search") == json.loads(json.dumps(settings["search"]))
            return cls(run, recipe, fingerprint, data["points"], complete, data["base"])
        return cls(run, recipe, fingerprint, [], False)

    def save(self) -> None:
        self.points.sort(key=lambda p: p["compression"]["stored"])
        self.run.write_rank_table(
            {
                "version": TABLE_VERSION,
                "fingerprint": self.fingerprint,
                "evaluation": self.recipe.to_dict()["evaluation"],
                "search": self.recipe.to_dict()["search"],
                "complete": self.complete,
                "base": self.base,
                "points": self.points,
            }
        )

    def find(self, plan: RankPlan) -> dict[str, Any] | None:
        ranks = _as_lists(plan.rounded)
        return next((p for p in self.points if p["ranks"]["stored"] == ranks), None)

    def accuracy(self, point: dict[str, Any], split: str) -> float:
        return point[split][accuracy_field(self.recipe.evaluation.metric)]


class Measurer:
    """Measures rank plans on both splits against the uncompressed model, and adds them to a table."""

    def __init__(
        self,
        table: RankTable,
        network: CompressibleModel,
        bases: list[LayerBases],
        data: EvaluationData,
        progress: Progress,
    ) -> None:
        self.table, self.network, self.bases, self.data, self.progress = table, network, bases, data, progress
        checkpoint = network.checkpoint
        self.metric = make_metric(table.recipe.evaluation, checkpoint.tokenizer, checkpoint.config)
        self._base: dict[str, Scores] = {}

    def measure(self, plan: RankPlan) -> dict[str, Any]:
        """The table's point for a plan, measured if it is not there yet."""
        point = self.table.find(plan)
        if point is not None:
            return point
        if not self._base:
            self._measure_base()
        model = self.network.compress(self.bases, plan.rounded)
        point = {
            "removal_rate": plan.removal_rate,
            "compression": {"planned": round(plan.planned, 6), "stored": round(plan.stored, 6)},
            "ranks": {"exact": _as_lists(plan.exact), "stored": _as_lists(plan.rounded)},
        }
        for split in ("search", "report"):
            base, scores = self._base[split], self._score(model, split, self.metric.needs_reference)
            found = self.metric.measure(model, split, base, scores)
            measured: dict[str, Any] = {**ratios(base, scores), **found.fields}
            if split == "report":
                measured["interval"] = found.interval and list(found.interval)
            point[split] = {**measured, **{f"compressed_{k}": v for k, v in scores.as_dict().items()}}
        self.table.points.append(point)
        self.table.save()
        self.progress.message(
            f"compression {point['compression']['stored']:.3f}: accuracy {self.table.accuracy(point, 'search'):.4f}"
        )
        return point

    def _measure_base(self) -> None:
        model = self.network.restore()
        found = {split: self.metric.measure_base(model, split) for split in ("search", "report")}
        self._base = {split: self._score(model, split) for split in found}
        self.table.base = {
            **{split: {**scores.as_dict(), **found[split]} for split, scores in self._base.items()},
            "data": self.data.description,
            "data_sha256": self.data.sha256,
        }

    def _score(self, model: Any, split: str, against_base: bool = False) -> Scores:
        rows = getattr(self.data, split)
        with self.progress.task(f"measure ({split})", rows.numel(), "tokens") as advance:
            return score(model, rows, advance, self._base_logits if against_base else None)

    def _base_logits(self, rows: Tensor) -> Tensor:
        with self.network.uncompressed() as model:
            return batch_logits(model, rows)


def complete_table(measurer: Measurer, path: RankPath) -> None:
    """Measure the points of F_p: a coarse walk over compression, then bisection where targets lie.

    The walk goes in strides of four `step`s until accuracy falls below the floor. Neighbours are then halved until they
    are `resolution` apart where accuracy crosses a target, and `step` apart elsewhere between the largest target and
    the floor.
    """
    table, settings = measurer.table, measurer.table.recipe.search
    steps = path.steps()
    stored = [plan.stored for plan in steps]

    def accuracy(index: int) -> float:
        return table.accuracy(measurer.measure(steps[index]), "search")

    def refine(low: int, high: int) -> None:
        if high - low < 2:
            return
        better, worse = accuracy(low), accuracy(high)
        crossed = any(worse < target <= better for target in settings.targets)
        allowed = settings.resolution if crossed else settings.step
        irrelevant = min(better, worse) >= max(settings.targets, default=0) or max(better, worse) < settings.floor
        if stored[high] - stored[low] <= allowed or irrelevant:
            return
        middle_value = (stored[low] + stored[high]) / 2
        middle = min(range(low + 1, high), key=lambda i: abs(stored[i] - middle_value))
        refine(low, middle)
        refine(middle, high)

    anchors = [0]
    while accuracy(anchors[-1]) >= settings.floor and anchors[-1] < len(steps) - 1:
        target = stored[anchors[-1]] + 4 * settings.step
        later = range(anchors[-1] + 1, len(steps))
        anchors.append(next((i for i in later if stored[i] >= target), len(steps) - 1))
    for low, high in pairwise(anchors):
        refine(low, high)
    table.complete = True
    table.save()


def choose(table: RankTable, target: float) -> dict[str, Any]:
    """The measured point of highest compression whose accuracy is at least `target` on both splits.

    Raises:
        AccuracyError: no point reaches it; names the best value.
    """
    reached = [
        p for p in table.points if table.accuracy(p, "search") >= target and table.accuracy(p, "report") >= target
    ]
    if not reached:
        best = max(table.points, key=lambda p: min(table.accuracy(p, "search"), table.accuracy(p, "report")))
        accuracy = min(table.accuracy(best, "search"), table.accuracy(best, "report"))
        raise AccuracyError(
            f"accuracy {target} is out of reach: the best measured is {accuracy:.4f}, "
            f"at compression {best['compression']['stored']:.3f}.",
            "Ask for less, or calibrate with another recipe or with more tokens.",
        )
    return max(reached, key=lambda p: p["compression"]["stored"])


def plan_for(path: RankPath, removal_rate: float | None, compression: float | None) -> RankPlan:
    """The plan at a removal rate, or the mildest one that removes at least a share of the cache.

    Raises:
        UsageError: the share cannot be reached at these rank multiples; names the largest that can.
    """
    if removal_rate is not None:
        return path.plan(removal_rate)
    assert compression is not None
    plan = path.at_compression(compression)
    if plan is None:
        raise UsageError(
            f"--compression {compression}: the most that can be removed is {path.steps()[-1].stored:.4f}, "
            f"with ranks in multiples of {path.multiple_of}.",
            "Ask for less, or lower it with --set ranks.multiple_of=8.",
        )
    return plan


def _as_lists(ranks: list[list[tuple[int, int]]]) -> list[list[list[int]]]:
    return [[list(pair) for pair in layer] for layer in ranks]
