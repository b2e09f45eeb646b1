"""The search for the ranks that an export writes: read from the run's tables, or measured."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ...calibration.allocation.plan import Plan
from ...checkpoint.folding import model_layouts
from ...errors import AccuracyError, UsageError
from ...models.compressible import CompressibleModel
from ...models.hardware import DevicePlan
from ...models.readiness import describe_evaluation
from ...models.splits import EvaluationData, evaluation_data
from ...progress import Progress, StageTimes, in_time
from ..evaluation.accuracy import Fidelity
from ..evaluation.estimate import evaluation_plan
from ..evaluation.fidelity import FidelityMeter
from ..evaluation.prompts import EvaluationContext
from ..plan_choice import find_plan, plan_for
from ..plan_evaluator import PlanEvaluator
from ..point import Point
from .job import ExportJob

if TYPE_CHECKING:
    from ...policies import Policy


class RankSearch(PlanEvaluator):
    """Finds the plan that an export's goal asks for."""

    def __init__(self, job: ExportJob, times: StageTimes, progress: Progress) -> None:
        super().__init__(
            job.run,
            job.recipe,
            DevicePlan.choose(job.request, job.checkpoint.dtype),
            progress,
            data=self._load_text,
            network=self._load_model,
            meter=self._make_meter,
            policy=job.policy,
            times=times,
            context_tokens=job.context_tokens,
        )
        self.job = job

    def point(self) -> Point:
        """The point that the goal leads to, measured on both splits, or on none (see ExportJob.unmeasured).

        Only this point is measured on the report split.

        Raises:
            AccuracyError: no point reaches the accuracy. UsageError: the compression cannot be reached.
        """
        plan = self._plan()
        if self.searches_ratios:
            self.follow(self._ratios(plan))
        return Point.of(plan) if self.job.unmeasured else self.measure(plan)

    def stored_policy(self, point: Point) -> Policy | None:
        """The cache policy that is stored, fitted at this point on the search split where it needs samples."""
        if self.policy is None or not self.policy.needs_samples:
            return self.policy
        meter, network = self.meter, self.network
        with self.times.stage("fit cache policy"), self.progress.task("fit cache policy", None, ""):
            self.compress(point)
            return meter.fitted_policy(network)

    def close(self) -> None:
        """Let go of the model, which is not needed any more."""
        for name in ("network", "meter"):
            self.__dict__.pop(name, None)

    @property
    def searches_ratios(self) -> bool:
        """Tell whether the goal is kept by the policy's ratios, beside which ranks are at their mildest."""
        return self.job.request.accuracy is not None and getattr(self.job.policy, "search", False)

    def follow(self, policy: Policy) -> None:
        """Measure with another policy from now on, in its own table."""
        self.policy = policy
        self.__dict__.pop("table", None)
        if "meter" in self.__dict__:
            self.meter.policy = policy

    def _ratios(self, plan: Plan) -> Policy:
        """The policy whose ratios keep the accuracy that is asked."""
        from ...policies import Tiers
        from ...policies.agreement import agreement, agreement_in_words, shared_choices
        from ..ratio_grid import find_by_regression, find_optimum
        from ..ratio_search import Cache, RatioPlan, find_ratios

        policy, target = self.job.policy, self.job.request.accuracy
        assert isinstance(policy, Tiers)
        assert target is not None
        layouts = model_layouts(self.run.bases(plan.channels), plan.ranks)
        cache = Cache(plan, layouts, self.run.shape, int(self.run.info["element_bytes"]))

        def shared(candidate: Tiers) -> Tiers:
            """The policy with the layers that share a choice at its shares."""
            if candidate.share_above is None or len(layouts) == 1:
                return replace(candidate, search=False)
            shares = candidate.shares(len(layouts))
            if shares not in leaders:
                self.compress(plan)
                agreeing = agreement(self.network.model, candidate, self.data.search)
                leaders[shares] = shared_choices(agreeing, candidate.share_above)
                self.progress.message(f"g {shares[0]:g}: {agreement_in_words(agreeing, candidate.share_above)}")
            return replace(candidate, search=False, shared_with=leaders[shares])

        leaders: dict[tuple[float, ...], tuple[int, ...]] = {}

        def measure(candidate: RatioPlan) -> Fidelity:
            assert candidate.policy is not None
            self.follow(shared(candidate.policy))
            measured = self.search(plan)
            self.progress.message(
                f"{candidate.policy.in_words}: removes {candidate.stored:.3f}, {measured.accuracy:.4f}"
            )
            return measured

        ways = {"bisection": find_ratios, "regression": find_by_regression, "oracle": find_optimum}
        return shared(ways[policy.search_by](cache, policy, target, self.recipe.search, measure))

    def _plan(self) -> Plan:
        """Find the plan of the goal, and measure where the table lacks something."""
        request = self.job.request
        if self.searches_ratios:
            return plan_for(self.path, None, 0.0)
        if (target := request.accuracy) is None:
            return plan_for(self.path, request.removal_rate, request.compression)
        points = self.recipe.search.points(self.recipe.coded)
        seconds = list[float]()

        def fidelity(plan: Plan) -> Fidelity:
            before, start = self.measured_points, time.perf_counter()
            measured = self.search(plan)
            if self.measured_points > before:
                seconds.append(time.perf_counter() - start)
                if len(seconds) == 1 and points > 1:
                    left = in_time((points - 1) * seconds[0])
                    self.progress.message(f"accuracy {target:g}: about {points - 1} more point(s) to measure, {left}")
            return measured

        try:
            return find_plan(self.path, self.recipe.search, target, fidelity)
        except AccuracyError as error:
            if not self.table.base.get("search", {}).get("at_chance"):
                raise
            raise AccuracyError(
                f"{error.message} The uncompressed model is at chance on this text, where ratios to it mean nothing.",
                "Measure on text that the model is trained for: --set evaluation.source=text --set "
                "evaluation.path=FILE; or give a --compression.",
            ) from error

    def _load_text(self) -> EvaluationData:
        evaluation = self.recipe.evaluation
        checkpoint = self.job.checkpoint
        with self.times.stage("load text"), self.progress.task("load text", None, ""):
            return evaluation_data(evaluation, checkpoint.config, checkpoint.tokenizer, self.run.calibrated_documents)

    def _make_meter(self) -> FidelityMeter:
        evaluation = self.recipe.evaluation
        checkpoint = self.job.checkpoint
        self.progress.message(f"text: {describe_evaluation(evaluation, checkpoint.tokenizer)}")
        context = EvaluationContext.of(evaluation, self.data, checkpoint.tokenizer, checkpoint.config)
        return FidelityMeter(context, self.progress, self.policy)

    def _load_model(self) -> CompressibleModel:
        job = self.job
        checkpoint = self.job.checkpoint
        folder = self.run.folder
        if not self.run.writable:
            raise UsageError(
                f"{folder}: cannot be written, and what this export has to measure first is kept there.",
                f"Copy the run (cp -r {folder} COPY), and export from the copy.",
            )
        with self.times.stage("load model"):
            with self.progress.task("check model", checkpoint.total_bytes(), "B") as advance:
                for file in checkpoint.files:
                    job.check_unchanged(file)
                    advance((checkpoint.folder / file).stat().st_size)
            plan = evaluation_plan(checkpoint, job.recipe, job.request, self.progress)
            if job.request.writes_texts and plan.streamed:
                asked = "--texts" if job.request.texts else "--prompt"
                raise UsageError(
                    f"{asked}: writing texts needs all weights in memory; layer by layer each token would read all.",
                    f"Leave {asked} out, or give --offload never on a machine that can hold them.",
                )
            with self.progress.task("load model", None, ""):
                return CompressibleModel(checkpoint, plan, workspace=job.run.folder)
