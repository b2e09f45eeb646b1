"""What the tasks of a study share: the model and the held-out data, loaded when first needed, and calibrations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..allocation.plan import RankPath
from ..calibration.calibrate import calibrate
from ..calibration.partial import PartialRun
from ..calibration.run import Run
from ..data.rows import spread_rows, text_rows
from ..data.splits import EvaluationData, evaluation_data, held_out_documents
from ..errors import AccuracyError, DataError, UsageError
from ..evaluation.fidelity import FidelityMeter
from ..evaluation.fitting import FIT_TOKENS
from ..evaluation.metrics import EvaluationContext, make_metric
from ..evaluation.metrics.distance import Distance, Prompts
from ..evaluation.placement import Placement
from ..format.layout import uncompressed_kv_bytes_per_token
from ..format.places import OutputFolder
from ..models.checkpoint import Checkpoint
from ..progress import Progress
from ..recipe import Recipe
from ..recipe.metric_registry import primitive_metrics
from ..rewriting.compressible import CompressibleModel
from ..runtime.families import attention_shape
from ..search.measurer import Measurer
from ..search.point import Point
from ..search.search import find_plan
from .caches import CacheBench
from .request import StudyPlan
from .store import StudyStore

TASKS = ("lookup", "copy")

TARGETS = (0.99, 0.95, 0.90)
"""Accuracies for which the strongest compression is looked for."""


class StudyContext:
    """See the module.

    Args:
        options: of `calibrate`, for every calibration.
    """

    def __init__(
        self,
        plan: StudyPlan,
        store: StudyStore,
        checkpoint: Checkpoint,
        placement: Placement,
        progress: Progress,
        options: dict[str, Any],
    ) -> None:
        self.plan, self.store, self.checkpoint, self.placement = plan, store, checkpoint, placement
        self.progress, self.options, self.evaluation = progress, options, plan.first.evaluation
        self._open: tuple[str, Measurer, RankPath] | None = None
        self._benches: dict[str, CacheBench] = {}

    @cached_property
    def network(self) -> CompressibleModel:
        return self.placement.model(self.checkpoint, self.store.folder)

    @cached_property
    def data(self) -> EvaluationData:
        """Held-out text."""
        return evaluation_data(self.evaluation, self.checkpoint.config, self.checkpoint.tokenizer)

    @cached_property
    def meter(self) -> FidelityMeter:
        """Measures all points, so that the uncompressed model runs once a split."""
        context = EvaluationContext(self.evaluation, self.data.rows, self.checkpoint.tokenizer, self.checkpoint.config)
        return FidelityMeter(context, self.progress)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The checkpoint's: bytes are counted as they are served."""
        dtype: torch.dtype = self.checkpoint.config.dtype or torch.float32
        return dtype

    @property
    def whole_bytes(self) -> int:
        """Bytes of a token in the uncompressed cache.

        Raises:
            UsageError: the model's weights are not all in memory.
        """
        if self.placement.streamed:
            raise UsageError(
                "--parts methods and others about caches: they are read step by step, which needs all weights in "
                "memory.",
                "Give --offload never on a machine that can hold them, or leave these parts out.",
            )
        return uncompressed_kv_bytes_per_token(attention_shape(self.checkpoint.config), self.cache_dtype.itemsize)

    def bench(self, name: str = "", rows: Callable[[], Tensor] | None = None) -> CacheBench:
        """The model and the data of the parts that read a cache step by step.

        Args:
            name, rows: a text by name, and what makes it when it is first asked for; else the report split and its
                tasks.
        """
        if name not in self._benches:
            texts = (self.data.report, self.cache_tasks) if rows is None else (rows(), {})
            self._benches[name] = self._bench(*texts)
        return self._benches[name]

    def _bench(self, text: Tensor, tasks: dict[str, Prompts]) -> CacheBench:
        whole, length = self.whole_bytes, text.shape[1]
        prefill = max(1, min(int(length * self.plan.settings.prompt_share), length - 2))
        samples = partial(self.calibration_rows, max(1, FIT_TOKENS // length))
        return CacheBench(self._cache_network, text, prefill, tasks, whole, samples, progress=self.progress)

    @cached_property
    def _cache_network(self) -> CompressibleModel:
        place = replace(self.placement, dtype=self.cache_dtype)
        return self.network if place == self.placement else place.model(self.checkpoint, self.store.folder)

    @property
    def cache_tasks(self) -> dict[str, Prompts]:
        """Look-up and copy prompts, as far as the metric has them and the text is long enough."""
        tasks = {}
        for name in (task for task in TASKS if task in primitive_metrics(self.evaluation.metric)):
            metric = make_metric(name, self.meter.context)
            assert isinstance(metric, Distance)
            try:
                tasks[name] = metric.prompts("report")
            except DataError as error:
                self.progress.message(f"caches are not measured by `{name}`: {error.message}")
        return tasks

    def calibration_rows(self, count: int) -> Tensor:
        """Rows [count, seq_len] of the text that is kept for calibrations."""
        found = held_out_documents(self.evaluation)
        rows = text_rows(found.calibration, self.checkpoint.tokenizer, self.data.report.shape[1])
        return spread_rows(rows, count, f"study, calibration part of {found.description}")

    def folder(self, name: str) -> Path:
        return self.store.folder / "runs" / name

    def run(self, name: str, recipe: Recipe) -> Run:
        """The run of a recipe, calibrated unless it is there.

        Raises:
            UsageError: the folder holds a run of another recipe or model.
        """
        folder = self.folder(name)
        if not folder.exists():
            self.progress.message(f"calibrate {name}")
            return self.calibrate(folder, recipe, resume=PartialRun(OutputFolder.at(folder, "run")).exists)
        run = Run.open(folder)
        same_model = run.info["model"].get("shards") == self.store.settings["model"]["shards"]
        if not same_model or _without_path(run.recipe) != _without_path(recipe):
            raise UsageError(
                f"{folder}: was calibrated for another {'recipe' if same_model else 'model'}.",
                "Delete it, and the study calibrates again.",
            )
        return run

    def calibrate(self, folder: Path, recipe: Recipe, **options: Any) -> Run:
        return calibrate(self.checkpoint.folder, folder, recipe, **options, **self.options)

    def measurer(self, run: Run, recipe: Recipe) -> Measurer:
        """What measures points of a run into its tables."""
        place, recipe = self.placement, replace(recipe, evaluation=self.evaluation)
        sources: dict[str, Any] = {
            "data": lambda: self.data,
            "network": lambda: self.network,
            "meter": lambda: self.meter,
        }
        return Measurer(run, recipe, place.dtype, place.device, self.progress, **sources)

    def path(self, name: str, recipe: Recipe) -> tuple[Measurer, RankPath]:
        """What measures points of a recipe's run, and all its rank plans; the last that were asked for are kept."""
        if self._open is None or self._open[0] != name:
            measurer = self.measurer(self.run(name, recipe), recipe)
            self._open = name, measurer, measurer.path
        return self._open[1:]

    def at_targets(
        self, measurer: Measurer, path: RankPath, recipe: Recipe, describe: Callable[[Point], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """By target, the point that `rotor export --accuracy` would choose, or why there is none."""
        found: dict[str, dict[str, Any]] = {}
        for target in TARGETS:
            try:
                plan = find_plan(path, recipe.search.resolution, target, measurer.search)
            except AccuracyError as error:
                found[f"{target:.2f}"] = {"out_of_reach": error.message}
            else:
                found[f"{target:.2f}"] = describe(measurer.measure(plan))
        return found


def _without_path(recipe: Recipe) -> dict[str, Any]:
    """Settings of a recipe but where its text lies, as the study's folder may be named in several ways."""
    data = recipe.to_dict()
    data["tokens"] = {key: value for key, value in data["tokens"].items() if key != "path"}
    return data
