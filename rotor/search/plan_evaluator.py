"""Measures plans of a run and writes the results into the run's tables; the model is loaded when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..calibration.allocation.bits import BitsPath
from ..calibration.allocation.paths import PATHS
from ..calibration.allocation.plan import Plan, RankInputs, RankPath, Sensitivity, Spectra
from ..calibration.run import Run, read_weight_fisher
from ..errors import UsageError
from ..models.compressible import CompressibleModel
from ..models.hardware import DevicePlan
from ..models.splits import SPLITS, EvaluationData
from ..progress import Progress, StageTimes
from ..recipe.recipe import Recipe
from .evaluation.accuracy import Fidelity
from .evaluation.fidelity import FidelityMeter
from .point import Point
from .probe import probe
from .table import Context, ProbeTable, RankTable

if TYPE_CHECKING:
    from ..policies import Policy


class PlanEvaluator:
    """Measures plans and probes of a run against the uncompressed model, and adds them to its tables.

    Args:
        recipe: the run's, with what was overridden. devices: where forward passes run.
        data, network, meter: held-out text, the model, and what compares it; called when they are needed.
        times: of the stages. context_tokens: of the sequence whose bytes plans count.
    """

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        devices: DevicePlan,
        progress: Progress,
        *,
        data: Callable[[], EvaluationData],
        network: Callable[[], CompressibleModel],
        meter: Callable[[], FidelityMeter],
        policy: Policy | None = None,
        times: StageTimes | None = None,
        context_tokens: int | None = None,
    ) -> None:
        self.run = run
        self.recipe = recipe
        self.progress = progress
        self.policy = policy
        self.times = times or StageTimes()
        self.context_tokens = context_tokens
        self.measured_points = 0
        """Number of measurements of a plan on a split."""
        self._devices = devices
        self._data = data
        self._network = network
        self._meter = meter

    @cached_property
    def data(self) -> EvaluationData:
        """Held-out text without what was calibrated on."""
        return self._data()

    @cached_property
    def network(self) -> CompressibleModel:
        return self._network()

    @cached_property
    def meter(self) -> FidelityMeter:
        return self._meter()

    @cached_property
    def table(self) -> RankTable:
        """The table of the context in which plans are measured."""
        counted = self.context_tokens if self.run.shape.windows else None  # else it counts for nothing
        recipe = self.recipe
        context = Context.of(recipe.evaluation, self.data, self._devices, self.policy, counted, recipe.exact.tokens)
        return RankTable.open(self.run, context)

    @cached_property
    def probes(self) -> ProbeTable:
        """The sensitivities that were probed with the recipe's settings."""
        ranks, search = self.recipe.ranks, self.data.search
        rows = search[: max(1, ranks.probe_tokens // search.shape[1])]
        return ProbeTable.open(self.run, ranks, rows, self._devices)

    @cached_property
    def path(self) -> RankPath:
        """All plans of the recipe, after measuring what its method needs."""
        return self.path_of(self.recipe)

    def path_of(self, recipe: Recipe) -> RankPath:
        """All plans of another recipe on the same run, after measuring what its method needs."""
        if "sensitivities" not in recipe.rank_needs:
            return rank_path(self.run, recipe, context_tokens=self.context_tokens)
        self.probe()
        return rank_path(self.run, recipe, self.probes.sensitivities, self.context_tokens)

    def probe(self) -> None:
        """Measure the sensitivity of every layer and side that has none yet, and keep it.

        Compresses that side of that layer alone, at each of the probed ranks; the sensitivity there is the KL
        divergence of the final logits, in nats per token, per unit of dropped energy (squared singular values).
        """
        probes = self.probes
        if probes.complete:
            return
        known = probes.sensitivities
        layers = self.run.shape.num_layers
        network = self.network
        with self.times.stage("probe"), self.progress.task("probe", layers - len(known), "layers") as advance:
            for sensitivity in probe(network, self.run.bases(), self.recipe.ranks, probes.rows, len(known), advance):
                known.append(sensitivity)
                probes.save()

    def compress(self, plan: Plan | Point, network: CompressibleModel | None = None) -> None:
        """Compress the network, or another one of the model, by a plan, with the recipe's exact tokens."""
        bases = self.run.bases(plan.channels)
        (network or self.network).compress(bases, plan.ranks, self.recipe.exact.tokens)

    def search(self, plan: Plan) -> Fidelity:
        """Measure the fidelity of a plan on the search split."""
        return self.measure(plan, ["search"]).fidelity("search")

    def measure(self, plan: Plan, splits: Sequence[str] | None = None) -> Point:
        """The table's point for a plan, measured where it was not yet, with one rewrite of the model.

        Args:
            splits: by default both.
        """
        splits = SPLITS if splits is None else splits
        point = self.table.find(plan) or Point.of(plan)
        missing = [split for split in splits if not point.has(split)]
        if not missing:
            return point
        meter, network = self.meter, self.network
        with self.times.stage("measure"):
            if "search" in self.table.left_out:
                meter.left_out.setdefault("search", self.table.left_out["search"])
            for split in missing:
                if split not in meter.base:
                    network.restore()
                    meter.measure_base(network, split)
                self.table.base[split] = meter.base[split]
                self.table.left_out[split] = meter.left_out[split]
            self.compress(plan, network)
            for split in missing:
                point = point.with_fidelity(split, meter.measure(network, split))
        self.measured_points += len(missing)
        self.table.put(point)
        if "search" in missing:
            value = point.fidelity("search").accuracy
            what = "compression" if self.policy is None else "compression of the rows"
            self.progress.message(f"{what} {point.stored:.3f}: accuracy {value:.4f} (search split)")
        return point


def rank_path(
    run: Run, recipe: Recipe, sensitivities: Sequence[Sensitivity] = (), context_tokens: int | None = None
) -> RankPath:
    """All rank plans that the recipe's rank method can give for a run's bases.

    Args:
        sensitivities: what `probe` measured; needed by methods that ask for it only.
        context_tokens: of the sequence whose bytes are counted; None counts all layers alike.
    Raises:
        UsageError: ranks are asked for, of latents that keys and values share: these have singular values of no side.
    """
    layers, ranks = range(run.shape.num_layers), recipe.ranks
    if recipe.coded:
        codes = [run.layer_codes(layer) for layer in layers]
        return BitsPath(codes, run.shape, recipe.codes.bits, int(run.info["element_bytes"]), context_tokens)
    if run.form.joint:
        raise UsageError(
            f"codes.bits {list(recipe.codes.bits)}: in this run keys and values share latents, whose channels are "
            "chosen by bits of codes alone.",
            "Give codes.bits 12, 8 or 4 too, or calibrate again with --set groups.joint=false.",
        )
    spectra = [Spectra(*run.spectra(layer).values()) for layer in layers]

    def gradients() -> list[tuple[torch.Tensor, torch.Tensor]]:
        layers = read_weight_fisher(run.folder, run.shape)
        groups = [information.unflatten(-1, (-1, run.form.group_size)).sum(-1) for information in layers]
        return [(keys, values) for keys, values in groups]

    return PATHS[ranks.method](
        RankInputs(spectra, run.shape, ranks.multiple_of, gradients, sensitivities, context_tokens)
    )
