"""From a run and a goal to the ranks that are written: read from the run's tables, or measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from ..allocation.plan import RankPath, RankPlan
from ..data.readiness import describe_evaluation
from ..data.splits import SPLITS, EvaluationData, evaluation_data
from ..errors import AccuracyError, UsageError
from ..evaluation.fidelity import Fidelity, FidelityMeter
from ..evaluation.metrics import EvaluationContext
from ..evaluation.placement import Placement
from ..models.hardware import pick_device, pick_dtype
from ..policies import Policy
from ..progress import Progress, StageTimes, in_time
from ..rewriting.compressible import CompressibleModel
from .export_job import ExportJob
from .point import Point
from .search import Measurer, find_plan, most_points, plan_for, probe_rows, rank_path, search_target
from .table import Context, ProbeTable, RankTable
from .tiers import choose_tiers


class _Unmeasured(Exception):
    """A point that a search needs is not in the table."""


class RankSearch:
    """The ranks that an export's goal asks for.

    Args:
        network: the job's model, where it is loaded already.
    """

    def __init__(
        self, job: ExportJob, times: StageTimes, progress: Progress, network: CompressibleModel | None = None
    ) -> None:
        self.job, self.times, self.progress = job, times, progress
        self.bases = job.run.bases()
        self.measured_points = 0
        """How often a plan was measured on a split."""
        self._network = network
        self._measurer: Measurer | None = None
        self._path: RankPath | None = None

    @cached_property
    def data(self) -> EvaluationData:
        """Held-out text without what was calibrated on."""
        job, checkpoint = self.job, self.job.checkpoint
        with self.times.stage("load text"), self.progress.task("load text", None, ""):
            return evaluation_data(
                job.recipe.evaluation, checkpoint.config, checkpoint.tokenizer, job.run.calibrated_documents
            )

    @property
    def _place(self) -> tuple[torch.dtype, torch.device]:
        """Those that a model would be loaded with."""
        compute = self.job.settings.compute
        device = pick_device(compute.device)
        return pick_dtype(compute.dtype, self.job.checkpoint.config.dtype or torch.float32, device), device

    @cached_property
    def table(self) -> RankTable:
        """Of the context that the job measures in."""
        context = Context.of(self.job.recipe.evaluation, self.data, *self._place, self.job.policy)
        return RankTable.open(self.job.run, context)

    @cached_property
    def probes(self) -> ProbeTable:
        """Of the settings that the job probes with."""
        ranks = self.job.recipe.ranks
        return ProbeTable.open(self.job.run, ranks, probe_rows(ranks, self.data.search), *self._place)

    @property
    def needs_probes(self) -> bool:
        return "sensitivities" in self.job.recipe.rank_needs and not self.probes.complete

    def path(self) -> RankPath | None:
        """All rank plans of the recipe; None as long as its method needs probes that were not measured."""
        if self._path is None and not self.needs_probes:
            found = self.probes.sensitivities if "sensitivities" in self.job.recipe.rank_needs else None
            self._path = rank_path(self.bases, self.job.run, self.job.recipe, found)
        return self._path

    def known(self) -> RankPlan | None:
        """The plan that the goal leads to; None where something has to be measured first.

        Raises: as `point`.
        """
        path, goal = self.path(), self.job.goal
        if path is None:
            return None
        if goal.accuracy is None:
            return plan_for(path, goal.removal_rate, goal.compression)

        def known(plan: RankPlan) -> Fidelity:
            point = self.table.find(plan)
            if point is None or point.search is None:
                raise _Unmeasured
            return point.search

        try:
            resolution = self.job.recipe.search.resolution
            return find_plan(path.steps(), resolution, goal.accuracy, known, goal.confidence, path.lighter)
        except _Unmeasured:
            return None

    def point(self) -> Point:
        """The point that the goal leads to, measured on both splits (or, see ExportJob.unmeasured, on none).

        Only this point is measured on the report split.

        Raises:
            AccuracyError: no point reaches the accuracy. UsageError: the compression cannot be reached.
        """
        self._probe()
        goal = self.job.goal
        plan = self.known() if goal.accuracy is None else self._plan_at(goal.accuracy)
        assert plan is not None
        return Point.of(plan) if self.job.unmeasured else self._measure(plan, SPLITS)

    def with_tiers(self) -> RankSearch:
        """The search of the same job with the cache policy that `cache.tiers` asks for, chosen for the goal's ranks.

        Raises:
            UsageError: nothing can be measured, or weights are read layer by layer. Others as `point`, and
            AccuracyError: no ratios cost so little.
        """
        job = self.job
        settings = job.recipe.cache
        assert settings.tiers is not None
        if job.unmeasured:
            raise UsageError(
                f"cache.tiers {settings.tiers:g}: {job.unmeasured}, and ratios per token are chosen by measuring.",
                "Give --cache tiers-50, or the path of a policy.",
            )
        self._probe()
        plan, network = self.known(), self._loaded()
        assert plan is not None
        if network.source.streamed:
            raise UsageError(
                f"cache.tiers {settings.tiers:g}: a cache is read step by step, which needs all weights in memory.",
                "Give --offload never on a machine that can hold them, or --cache tiers-50.",
            )
        with self.times.stage("tiers"):
            network.compress(plan.select(self.bases), plan.rounded)
            search = self.data.search
            rows = search[: max(1, settings.tiers_tokens // search.shape[1])]
            policy, _ = choose_tiers(network, rows, settings.tiers, self.progress)
        return RankSearch(replace(job, policy=policy), self.times, self.progress, network)

    def policy(self, point: Point) -> Policy | None:
        """The cache policy that is stored: with what is found of the model at this point, on the search split."""
        policy = self.job.policy
        if policy is None or not policy.needs_samples:
            return policy
        measurer = self._measuring()
        with self.times.stage("fit cache policy"), self.progress.task("fit cache policy", None, ""):
            measurer.network.compress(self.bases.select(point.choice, point.channels), point.ranks)
            return measurer.meter.fitted_policy(measurer.network)

    def search_targets(self) -> None:
        """Measure what further targets need, so that they are in the table; one out of reach is noted there."""
        for target in self.job.settings.targets:
            try:
                self._plan_at(target)
            except AccuracyError as error:
                self.progress.message(error.message)

    def close(self) -> None:
        """The model is not needed any more."""
        self._measurer = self._network = None

    def _probe(self) -> None:
        if self.needs_probes:
            measurer = self._measuring()
            with self.times.stage("probe"):
                measurer.probe(self.job.recipe)

    def _measure(self, plan: RankPlan, splits: Sequence[str]) -> Point:
        """The point of a plan, measured on the splits where it is not yet."""
        point = self.table.find(plan)
        missing = [split for split in splits if point is None or not point.has(split)]
        if point is not None and not missing:
            return point
        measurer = self._measuring()
        with self.times.stage("measure"):
            self.measured_points += len(missing)
            return measurer.measure(plan, missing)

    def _plan_at(self, target: float) -> RankPlan:
        """The plan of a target, measured where the table lacks something."""
        path, recipe = self.path(), self.job.recipe
        assert path is not None
        most, seconds = most_points(recipe.search.resolution), list[float]()

        def fidelity(plan: RankPlan) -> Fidelity:
            before, start = self.measured_points, time.perf_counter()
            found = self._measure(plan, ["search"]).fidelity("search")
            if self.measured_points > before:
                seconds.append(time.perf_counter() - start)
                if len(seconds) == 1 and most > 1:
                    left = in_time((most - 1) * seconds[0])
                    self.progress.message(f"accuracy {target:g}: about {most - 1} more point(s) to measure, {left}")
            return found

        return search_target(self.table, path, recipe, target, fidelity, self.job.goal.confidence)

    def _measuring(self) -> Measurer:
        """Loads the model the first time that something has to be measured."""
        if self._measurer is None:
            job, checkpoint = self.job, self.job.checkpoint
            if not job.run.writable:
                raise UsageError(
                    f"{job.run.folder}: cannot be written, and what this export has to measure first is kept there.",
                    f"Copy the run (cp -r {job.run.folder} COPY), and export from the copy.",
                )
            self.progress.message(f"text: {describe_evaluation(job.recipe.evaluation, checkpoint.tokenizer)}")
            spec, network = job.recipe.evaluation, self._loaded()
            context = EvaluationContext(spec, self.data.rows, checkpoint.tokenizer, checkpoint.config)
            meter = FidelityMeter(context, self.progress, job.policy)
            self._measurer = Measurer(self.table, self.probes, network, self.bases, meter, self.progress)
        return self._measurer

    def _loaded(self) -> CompressibleModel:
        if self._network is None:
            job, checkpoint = self.job, self.job.checkpoint
            with self.times.stage("load model"):
                with self.progress.task("check model", checkpoint.total_bytes(), "B") as advance:
                    for file in checkpoint.files:
                        job.check_unchanged(file)
                        advance((checkpoint.folder / file).stat().st_size)
                place = Placement.choose(checkpoint, job.recipe, job.settings.compute, self.progress)
                with self.progress.task("load model", None, ""):
                    self._network = place.model(checkpoint, job.run.folder)
        return self._network
