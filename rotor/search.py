"""F_p: the measured table from accuracy to ranks, and the choice of a point in it.

Every point is compressed in memory and measured on both splits, once; the table is kept in the run folder. A point is
chosen by the search split; the report split may only veto it, so that what is written meets its target there too.

Source: FDC section 5.2 (the function F_p).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .compress import CompressibleModel
from .cost import Objective
from .devices import find_device
from .errors import AccuracyError, UsageError
from .evaluation import EvaluationData, Scores, ratios, score
from .layout import Domain
from .metrics import accuracy_field, make_metric
from .probe import Prober
from .progress import Progress
from .ranks import Cost, GroupCost, RankInputs, RankPath, RankPlan, RemovalRatePath, Sensitivity, Spectra
from .ranks.plan import SLACK
from .recipe import Recipe
from .run import TABLE_VERSION, Run, RunBases, read_fisher

SPLITS = ("search", "report")


def rank_path(bases: RunBases, run: Run, recipe: Recipe, sensitivities: list[Sensitivity] | None = None) -> RankPath:
    """All rank plans that the recipe's rank method can give for these bases.

    Args:
        sensitivities: what `probe` measured; needed by methods that ask for it only.
    """
    layers = [bases.spectra(layer) for layer in range(len(bases))]
    spectra, ranks = [{key: Spectra(qk, vo) for key, (qk, vo) in layer.items()} for layer in layers], recipe.ranks
    inputs = RankInputs(
        spectra,
        run.shape,
        ranks.multiple_of,
        squares=ranks.spectrum == "squares",
        gradients=lambda: _gradients(run),
        sensitivities=sensitivities,
        costs=lambda: costs(run, recipe),
    )
    return ranks.rule.path(inputs)


def _gradients(run: Run) -> list[tuple[Tensor, Tensor]]:
    """Summed squared gradients of W_k and W_v of each layer's groups; see FisherPath."""
    size = next(iter(run.info["candidates"].values()))["group_size"]
    both = (read_fisher(run.folder, layer) for layer in range(run.shape.num_layers))
    return [(keys.reshape(-1, size).sum(-1), values.reshape(-1, size).sum(-1)) for keys, values in both]


def costs(run: Run, recipe: Recipe) -> tuple[Cost, GroupCost]:
    """What a group of a candidate costs, by sides for allocating and whole for counting what a plan saves.

    Both as shares of the uncompressed model's attention under the recipe's objective.
    """
    settings, layers = recipe.objective, run.shape.num_layers
    device = find_device(settings.device, settings.device_file)
    objective = Objective.from_settings(settings, device, run.shape, int(run.info["element_bytes"]))
    kinds: dict[str, tuple[Domain, bool, int]] = {
        key: (c["domain"], bool(run.info["folded_keys"][key]), int(c["group_size"]))
        for key, c in run.info["candidates"].items()
    }

    def sides(key: str, ranks: list[int]) -> tuple[list[float], list[float]]:
        domain, folded, size = kinds[key]
        keys = [objective.key_cost(domain, folded, size, rank) / layers for rank in ranks]
        return keys, [objective.value_cost(size, rank) / layers for rank in ranks]

    def group(key: str, qk_rank: int, v_rank: int) -> float:
        domain, folded, size = kinds[key]
        return objective.group_cost(domain, folded, size, qk_rank, v_rank) / layers

    return sides, group


@dataclass
class RankTable:
    """The measured points of a run under one evaluation and rank setting, by stored compression.

    points: one dict a point: removal_rate, compression, ranks, and `search` and `report` measurements.
    probed: sensitivities of the first layers; saved as they are measured.
    """

    run: Run
    recipe: Recipe
    fingerprint: str
    points: list[dict[str, Any]]
    complete: bool
    base: dict[str, Any] | None = None
    probed: list[Sensitivity] = field(default_factory=list)

    @property
    def sensitivities(self) -> list[Sensitivity] | None:
        """Of all layers, once all are probed."""
        return self.probed if len(self.probed) == self.run.shape.num_layers else None

    @classmethod
    def open(cls, run: Run, recipe: Recipe) -> RankTable:
        """The table in the run folder, or an empty one if there is none that fits the recipe's settings."""
        settings = recipe.to_dict()
        relevant = json.dumps([settings["ranks"], settings["evaluation"], settings["objective"]], sort_keys=True)
        fingerprint = hashlib.sha256(relevant.encode()).hexdigest()
        data = run.read_rank_table()
        same = data is not None and data["evaluation"] == json.loads(json.dumps(settings["evaluation"]))
        if data is not None and same and data["fingerprint"] == fingerprint:
            complete = bool(data["complete"]) and data.get("search") == json.loads(json.dumps(settings["search"]))
            return cls(run, recipe, fingerprint, data["points"], complete, data["base"], data["sensitivities"] or [])
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
                "sensitivities": self.probed,
                "points": self.points,
            }
        )

    def find(self, plan: RankPlan) -> dict[str, Any] | None:
        ranks, choice = _as_lists(plan.rounded), list(plan.choice)
        return next((p for p in self.points if p["ranks"]["stored"] == ranks and p["choice"] == choice), None)

    def accuracy(self, point: dict[str, Any], split: str) -> float:
        return point[split][accuracy_field(self.recipe.evaluation.metric)]

    def worse_accuracy(self, point: dict[str, Any]) -> float:
        """A point has an accuracy if both splits have it."""
        return min(self.accuracy(point, split) for split in ("search", "report"))


class Measurer:
    """Measures rank plans on both splits against the uncompressed model, and adds them to a table."""

    def __init__(
        self,
        table: RankTable,
        network: CompressibleModel,
        bases: RunBases,
        data: EvaluationData,
        progress: Progress,
    ) -> None:
        self.table, self.network, self.bases, self.data, self.progress = table, network, bases, data, progress
        checkpoint = network.checkpoint
        self.metric = make_metric(table.recipe.evaluation, checkpoint.tokenizer, checkpoint.config)
        self._base: dict[str, Scores] = {}
        self._base_states: dict[str, Tensor] = {}

    def path(self) -> RankPath:
        """All rank plans of the recipe's method, after measuring what it needs."""
        if "sensitivities" in self.table.recipe.ranks.rule.needs:
            self.probe()
        return rank_path(self.bases, self.table.run, self.table.recipe, self.table.sensitivities)

    def probe(self) -> None:
        """Measure the sensitivity of every layer, side and candidate, and keep it in the table.

        Compresses that side of that layer alone, at each of the probed ranks; the sensitivity there is the KL
        divergence of the final logits, in nats per token, per unit of dropped energy (squared singular values).
        """
        known, layers = self.table.probed, self.table.run.shape.num_layers
        if len(known) == layers:
            return
        ranks = self.table.recipe.ranks
        rows = self.data.search[: max(1, ranks.probe_tokens // self.data.search.shape[1])]
        with self.progress.task("probe", layers - len(known), "layers") as advance:
            prober = Prober(self.network, self.bases, ranks, rows, len(known), advance)
            for found in prober.sensitivities():
                known += found
                self.table.save()

    def measure(self, plan: RankPlan) -> dict[str, Any]:
        """The table's point for a plan, measured if it is not there yet."""
        point = self.table.find(plan)
        if point is not None:
            return point
        if not self._base:
            self._measure_base()
        self.network.compress(plan.select(self.bases), plan.rounded)
        point = {
            "parameter": plan.parameter,
            "saving": round(plan.saving, 6),
            "compression": {"planned": round(plan.planned, 6), "stored": round(plan.stored, 6)},
            "choice": list(plan.choice),
            "ranks": {"exact": _as_lists(plan.exact), "stored": _as_lists(plan.rounded)},
        }
        found_states = self._states()
        for split in SPLITS:
            reference = self._base_states[split] if self.metric.needs_reference else None
            base, scores = self._base[split], self._score(split, found_states[split], reference)
            found = self.metric.measure(self.network, split, base, scores)
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
        self.network.restore()
        found = {split: self.metric.measure_base(self.network, split) for split in SPLITS}
        states = self._states()
        if self.metric.needs_reference:
            self._base_states = states
        self._base = {split: self._score(split, states[split]) for split in SPLITS}
        self.table.base = {
            **{split: {**scores.as_dict(), **found[split]} for split, scores in self._base.items()},
            "data": self.data.description,
            "data_sha256": self.data.sha256,
        }

    def _states(self) -> dict[str, Tensor]:
        """Final hidden states of both splits, in one pass through the layers."""
        rows = torch.cat([self.data.search, self.data.report])
        with self.progress.task("measure", rows.numel(), "tokens") as advance:
            states = self.network.final_states(rows, advance)
        middle = len(self.data.search)
        return {"search": states[:middle], "report": states[middle:]}

    def _score(self, split: str, states: Tensor, reference: Tensor | None = None) -> Scores:
        return score(self.network, getattr(self.data, split), reference=reference, states=states)


def complete_table(measurer: Measurer, path: RankPath) -> None:
    """Measure the points of F_p: a coarse walk over compression, then bisection where targets lie.

    The walk goes in strides of four `step`s until accuracy falls below the floor. Neighbours are then halved until they
    are `resolution` apart where accuracy crosses a target, and `step` apart elsewhere between the largest target and
    the floor; or until no plan of the path lies between them. Accuracy is that of the worse split, as in `choose`, so
    that a point that the report split refuses is as close to the one that is chosen.
    """
    table, settings = measurer.table, measurer.table.recipe.search
    steps = path.steps()
    stored = [plan.saving for plan in steps]

    def accuracy(index: int) -> float:
        return table.worse_accuracy(measurer.measure(steps[index]))

    def refine(low: int, high: int) -> None:
        better, worse = accuracy(low), accuracy(high)
        crossed = any(worse < target <= better for target in settings.targets)
        allowed = settings.resolution if crossed else settings.step
        irrelevant = min(better, worse) >= max(settings.targets, default=0) or max(better, worse) < settings.floor
        if high - low < 2 or stored[high] - stored[low] <= allowed + SLACK or irrelevant:
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
    """`choose_point` among the points of a table, by its metric."""
    return choose_point(table.points, accuracy_field(table.recipe.evaluation.metric), target)


def choose_point(points: list[dict[str, Any]], field: str, target: float) -> dict[str, Any]:
    """The measured point of highest saving whose accuracy is at least `target` on both splits.

    Args:
        field: the name of the accuracy in a point's measurements.
    Raises:
        AccuracyError: no point reaches it; names the best value.
    """

    def accuracy(point: dict[str, Any]) -> float:
        return min(point["search"][field], point["report"][field])

    reached = [point for point in points if accuracy(point) >= target]
    if not reached:
        best = max(points, key=accuracy)
        raise AccuracyError(
            f"accuracy {target} is out of reach: the best measured is {accuracy(best):.4f}, "
            f"at compression {best['compression']['stored']:.3f}.",
            "Ask for less, or calibrate with another recipe or with more tokens.",
        )
    return max(reached, key=lambda p: p["saving"])


def plan_for(path: RankPath, removal_rate: float | None, compression: float | None) -> RankPlan:
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
            f"--compression {compression}: the most that can be removed is {path.steps()[-1].stored:.4f}, "
            f"with ranks in multiples of {path.multiple_of}.",
            "Ask for less, or lower it with --set ranks.multiple_of=8.",
        )
    return plan


def _as_lists(ranks: list[list[tuple[int, int]]]) -> list[list[list[int]]]:
    return [[list(pair) for pair in layer] for layer in ranks]
