"""From a run and a goal to the ranks that are written: read from the run's table, or measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .bases import LayerBases
from .errors import AccuracyError
from .evaluation import evaluation_data
from .export_job import ExportJob
from .layout import LayerRanks
from .placement import Placement
from .probe import full_ranks
from .progress import Progress, StageTimes
from .ranks import RankPath, RankPlan
from .recipe import Recipe
from .search import Measurer, RankTable, choose, complete_table, plan_for, rank_path


class RankSearch:
    """The ranks that an export's goal asks for."""

    def __init__(self, job: ExportJob, times: StageTimes, progress: Progress) -> None:
        self.job, self.times, self.progress = job, times, progress
        self.bases = job.run.bases()
        self.table = RankTable.open(job.run, job.recipe)
        self._known = len(self.table.points)
        self._measurer: Measurer | None = None

    @property
    def measured_points(self) -> int:
        return len(self.table.points) - self._known

    @property
    def needs_probes(self) -> bool:
        return "sensitivities" in self.job.recipe.ranks.rule.needs and self.table.sensitivities is None

    def path(self) -> RankPath | None:
        """All rank plans of the recipe; None as long as its method needs probes that were not measured."""
        if self.needs_probes:
            return None
        return rank_path(self.bases, self.job.run, self.job.recipe, self.table.sensitivities)

    def known(self) -> RankPlan | dict[str, Any] | None:
        """The plan, or the point of the table, that the goal leads to; None where something has to be measured first.

        Raises: as `point`.
        """
        if self.job.goal.accuracy is not None:
            return choose(self.table, self.job.goal.accuracy) if self.table.complete else None
        path = self.path()
        return None if path is None else plan_for(path, self.job.goal.removal_rate, self.job.goal.compression)

    def point(self) -> dict[str, Any]:
        """The table's point that the goal leads to, after measuring what is missing.

        Raises:
            AccuracyError: no point reaches the accuracy. UsageError: the compression cannot be reached.
        """
        if self.needs_probes:
            measurer = self._measuring()
            with self.times.stage("probe"):
                measurer.probe()
        if self.job.goal.accuracy is not None and not self.table.complete:
            path, measurer = self.path(), self._measuring()
            assert path is not None
            with self.times.stage("measure"):
                complete_table(measurer, path)
        found = self.known()
        assert found is not None
        point = self.table.find(found) if isinstance(found, RankPlan) else found
        if point is None:
            assert isinstance(found, RankPlan)
            measurer = self._measuring()
            with self.times.stage("measure"):
                point = measurer.measure(found)
        self._measurer = None  # the model is not needed any more
        return point

    def _measuring(self) -> Measurer:
        """Loads the model the first time that something has to be measured."""
        if self._measurer is None:
            job, checkpoint = self.job, self.job.checkpoint
            with self.times.stage("load model"):
                with self.progress.task("check model", checkpoint.total_bytes(), "B") as advance:
                    for file in checkpoint.files:
                        job.check_unchanged(file)
                        advance((checkpoint.folder / file).stat().st_size)
                place = Placement.choose(checkpoint, job.recipe, job.settings.compute, self.progress)
                with self.progress.task("load text", None, ""):
                    data = evaluation_data(job.recipe.evaluation, checkpoint.config, checkpoint.tokenizer)
                with self.progress.task("load model", None, ""):
                    network = place.model(checkpoint, job.run.folder)
            self._measurer = Measurer(self.table, network, self.bases, data, self.progress)
        return self._measurer


def stored_ranks(bases: Sequence[LayerBases], ranks: list[LayerRanks], elastic: bool) -> list[LayerRanks]:
    """The ranks that the tensors have: an elastic checkpoint keeps all columns."""
    return [[full_ranks(layer)] * len(layer.qk.encode) for layer in bases] if elastic else ranks


def rank_profiles(table: RankTable, point: dict[str, Any], accuracy: float | None, recipe: Recipe) -> dict[str, Any]:
    """Accuracy -> ranks of every layer and group, for the goal and each search target that can be had.

    A profile may only change ranks: targets at which the table chooses another domain or group size are left out.
    """
    profiles = {}
    for target in sorted({*([] if accuracy is None else [accuracy]), *recipe.search.targets}, reverse=True):
        try:
            found = choose(table, target)
        except AccuracyError:
            continue
        if found["choice"] == point["choice"]:
            profiles[str(target)] = found["ranks"]["stored"]
    return profiles
