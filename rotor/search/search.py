"""F_p: from an accuracy to the ranks that keep it, by measuring points of a path of rank plans.

A target alone decides which plans are measured: a bisection over what they save, by the search split. What was measured
before only saves time, so that the same request leads to the same point, whatever else the table holds.

Source: FDC section 5.2 (the function F_p).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ..allocation.bits import BitsPath
from ..allocation.plan import SLACK, RankInputs, RankPath, RankPlan, Sensitivity, Spectra
from ..allocation.priced_bits import PricedBitsPath
from ..allocation.removal_rate import RemovalRatePath
from ..calibration.run import Run, RunBases, read_fisher
from ..data.splits import SPLITS
from ..errors import AccuracyError, UsageError
from ..evaluation.fidelity import Fidelity, FidelityMeter
from ..progress import Progress
from ..recipe import Ranks, Recipe
from ..rewriting.compressible import CompressibleModel
from .costs import RunCosts
from .point import Point
from .probe import probe
from .table import ProbeTable, RankTable, Request

TRIES = 3
"""Layers from which a unit is taken, at most, before a plan is final."""


def rank_path(bases: RunBases, run: Run, recipe: Recipe, sensitivities: list[Sensitivity] | None = None) -> RankPath:
    """All rank plans that the recipe's rank method can give for these bases.

    Args:
        sensitivities: what `probe` measured; needed by methods that ask for it only.
    Raises:
        UsageError: ranks are asked for, of latents that keys and values share: these have singular values of no side.
    """
    if recipe.coded:
        codes = [run.layer_codes(layer) for layer in range(len(bases))]
        sizes = run.shape, recipe.codes.bits, int(run.info["element_bytes"])
        if recipe.objective.weight == 0:
            return BitsPath(codes, *sizes, uniform_rows=recipe.ranks.uniform_rows)
        return PricedBitsPath(codes, *sizes, RunCosts.of(run, recipe).group)
    if any(candidate.joint for candidate in run.candidates.values()):
        raise UsageError(
            f"codes.bits {list(recipe.codes.bits)}: in this run keys and values share latents, whose channels are "
            "chosen by bits of codes alone.",
            "Give codes.bits 12, 8 or 4 too, or calibrate again with --set groups.joint=false.",
        )
    layers = [bases.spectra(layer) for layer in range(len(bases))]
    spectra, ranks = [{key: Spectra(qk, vo) for key, (qk, vo) in layer.items()} for layer in layers], recipe.ranks
    inputs = RankInputs(
        spectra,
        run.shape,
        ranks.multiple_of,
        squares=ranks.spectrum == "squares",
        gradients=lambda: _gradients(run),
        sensitivities=sensitivities,
        costs=lambda: RunCosts.of(run, recipe),
    )
    return ranks.rule.path(inputs)


def _gradients(run: Run) -> list[tuple[Tensor, Tensor]]:
    """Summed squared gradients of W_k and W_v of each layer's groups; see FisherPath."""
    size = next(iter(run.info["candidates"].values()))["group_size"]
    groups = read_fisher(run.folder, run.shape).unflatten(-1, (-1, size)).sum(-1)
    return [(keys, values) for keys, values in groups]


class Measurer:
    """Measures rank plans against the uncompressed model, and adds them to a table; probes likewise."""

    def __init__(
        self,
        table: RankTable,
        probes: ProbeTable,
        network: CompressibleModel,
        bases: RunBases,
        meter: FidelityMeter,
        progress: Progress,
    ) -> None:
        self.table, self.probes, self.network, self.bases = table, probes, network, bases
        self.meter, self.progress = meter, progress

    def path(self, recipe: Recipe) -> RankPath:
        """All rank plans of the recipe's method, after measuring what it needs."""
        if "sensitivities" in recipe.rank_needs:
            self.probe(recipe)
        return rank_path(self.bases, self.table.run, recipe, self.probes.sensitivities)

    def probe(self, recipe: Recipe) -> None:
        """Measure the sensitivity of every layer, side and candidate that has none yet, and keep it.

        Compresses that side of that layer alone, at each of the probed ranks; the sensitivity there is the KL
        divergence of the final logits, in nats per token, per unit of dropped energy (squared singular values).
        """
        known, layers = self.probes.sensitivities, self.table.run.shape.num_layers
        if self.probes.complete:
            return
        rows = probe_rows(recipe.ranks, self.meter.context.rows["search"])
        with self.progress.task("probe", layers - len(known), "layers") as advance:
            for found in probe(self.network, self.bases, recipe.ranks, rows, len(known), advance):
                known += found
                self.probes.save()

    def search(self, plan: RankPlan) -> Fidelity:
        """Fidelity of a plan on the search split."""
        return self.measure(plan, ["search"]).fidelity("search")

    def measure(self, plan: RankPlan, splits: Sequence[str] = SPLITS) -> Point:
        """The table's point for a plan, measured on those splits where it is not yet, with one rewrite of the model."""
        point = self.table.find(plan) or Point.of(plan)
        missing = [split for split in splits if not point.has(split)]
        if not missing:
            return point
        for split in missing:
            if split not in self.meter.base:
                self.network.restore()
                self.meter.measure_base(self.network, split)
            self.table.base[split] = self.meter.base[split]
            self.table.left_out[split] = self.meter.left_out[split]
        self.network.compress(plan.select(self.bases), plan.rounded)
        for split in missing:
            point = point.with_fidelity(split, self.meter.measure(self.network, split))
        self.table.put(point)
        if "search" in missing:
            value = point.fidelity("search").accuracy
            self.progress.message(f"compression {point.stored:.3f}: accuracy {value:.4f} (search split)")
        return point


def probe_rows(ranks: Ranks, search: Tensor) -> Tensor:
    """The rows of the search split [rows, seq_len] that probes run on."""
    return search[: max(1, ranks.probe_tokens // search.shape[1])]


def find_plan(
    steps: Sequence[RankPlan],
    resolution: float,
    target: float,
    fidelity: Callable[[RankPlan], Fidelity],
    confidence: float | None = None,
    lighter: Callable[[RankPlan], list[RankPlan]] = lambda plan: [],
) -> RankPlan:
    """The plan that a target leads to, by bisection over what plans save.

    The first plan is in the middle of the path; each next one halves what lies between the last that reached the target
    and the last that did not, until they are `resolution` apart or neighbours. Where a unit is more than `resolution`,
    plans beside the path follow: units are taken from one layer after another as long as the target is reached, since
    a layer may break at a width at which the predicted loss does not.

    Args:
        steps: of a path, by rising saving.
        fidelity: of a plan on the search split, measured or known.
        confidence: None compares the value with the target; 0.95 the lower end of its 95 % interval.
        lighter: see RankPath; the first TRIES are measured.
    Raises:
        AccuracyError: no plan reaches the target; names the best that was measured.
        UsageError: a confidence of a metric that has no interval.
    """
    tried: list[tuple[float, RankPlan]] = []

    def reaches(plan: RankPlan) -> bool:
        found = fidelity(plan)
        value = found.accuracy if confidence is None else found.lower
        if value is None:
            raise UsageError("this metric has no interval, which --confidence asks for.", "Leave --confidence out.")
        tried.append((value, plan))
        return value >= target

    low, high = -1, len(steps)  # the last that reaches the target, and the first that does not: none yet
    while high - low > 1:
        begin, end = steps[max(low, 0)].saving, steps[min(high, len(steps) - 1)].saving
        near = end - begin <= resolution + SLACK
        if near and low >= 0:
            break
        halfway = begin if near else (begin + end) / 2
        middle = min(range(low + 1, high), key=lambda i: abs(steps[i].saving - halfway))
        low, high = (middle, high) if reaches(steps[middle]) else (low, middle)
    if low >= 0:
        chosen: RankPlan | None = steps[low]
        while chosen is not None:
            reached = chosen
            coarse = (plan for plan in lighter(reached)[:TRIES] if plan.saving - reached.saving > resolution)
            chosen = next((plan for plan in coarse if reaches(plan)), None)
        return reached
    best, plan = max(tried, key=lambda found: (found[0], found[1].saving), default=(math.nan, None))
    of = "" if confidence is None else f" at the lower end of its {100 * confidence:g} % interval"
    raise AccuracyError(
        f"accuracy {target} is out of reach: the best measured is {best:.4f}{of}, at compression {plan.stored:.3f}."
        if plan is not None
        else f"accuracy {target} is out of reach: this recipe has no rank plans to measure.",
        "Ask for less, or calibrate with another recipe or with more tokens.",
    )


def search_target(
    table: RankTable,
    path: RankPath,
    recipe: Recipe,
    target: float,
    fidelity: Callable[[RankPlan], Fidelity],
    confidence: float | None = None,
) -> RankPlan:
    """`find_plan` on a path of a recipe, raising the same; the table notes what the request led to."""
    request = Request(target, confidence, method_key(recipe), None)
    try:
        plan = find_plan(path.steps(), recipe.search.resolution, target, fidelity, confidence, path.lighter)
    except AccuracyError:
        table.note(request)
        raise
    table.note(replace(request, point=Point.of(plan).key))
    return plan


def most_points(resolution: float) -> int:
    """The most points that the search for one target measures, where plans lie close together."""
    return max(1, math.ceil(math.log2(1 / resolution)) + 1)


def method_key(recipe: Recipe) -> str:
    """A hash of what a choice depends on besides target and context."""
    data = recipe.to_dict()
    parts = json.dumps([data["ranks"], data["codes"], data["objective"], data["search"]["resolution"]], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


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
            f"with {path.step[0]}.",
            f"Ask for less, or {path.step[1]}.",
        )
    return plan
