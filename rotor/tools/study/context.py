"""The model, the held-out data and the calibrations that the tasks of a study share, loaded when first needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ...calibration.allocation.plan import Plan, RankPath
from ...calibration.calibrate import calibrate
from ...calibration.partial import PartialRun
from ...calibration.run import Run
from ...checked import JsonObject
from ...checkpoint.families import attention_shape
from ...checkpoint.output_folder import OutputFolder
from ...checkpoint.sizes import uncompressed_kv_bytes_of_sequence, uncompressed_kv_bytes_per_token
from ...errors import UsageError
from ...models.compressible import CompressibleModel
from ...models.hardware import DevicePlan
from ...models.sequences import context_tokens, evenly_spaced, text_sequences
from ...models.source import Checkpoint
from ...models.splits import CALIBRATION, EvaluationData, evaluation_data, held_out_documents
from ...policies.fitting import FIT_TOKENS
from ...progress import Progress
from ...recipe.metric_registry import primitive_metrics
from ...recipe.recipe import Recipe
from ...recipe.requests import StudyRequest
from ...recipe.sections import Evaluation
from ...search.evaluation.fidelity import FidelityMeter
from ...search.evaluation.prompts import EvaluationContext
from ...search.plan_evaluator import PlanEvaluator
from .caches import CacheBench
from .inputs import StudyInputs
from .store import StudyStore

PROMPTS = ("lookup", "copy")
"""Metrics whose prompts are read through caches, where the study's metric has them."""

TARGETS = (0.99, 0.95, 0.90)
"""Accuracies whose strongest compression is searched."""


@dataclass
class StudyContext:
    """See the module. request: what the user asked for; its options of `calibrate` hold for every calibration."""

    inputs: StudyInputs
    store: StudyStore
    checkpoint: Checkpoint
    devices: DevicePlan
    progress: Progress
    request: StudyRequest
    _open: tuple[str, PlanEvaluator, RankPath] | None = None

    @property
    def evaluation(self) -> Evaluation:
        return self.inputs.first.evaluation

    @cached_property
    def network(self) -> CompressibleModel:
        return CompressibleModel(self.checkpoint, self.devices, workspace=self.store.folder)

    @cached_property
    def data(self) -> EvaluationData:
        """Held-out text."""
        return evaluation_data(self.evaluation, self.checkpoint.config, self.checkpoint.tokenizer)

    @cached_property
    def meter(self) -> FidelityMeter:
        """Measures all points, so that the uncompressed model runs once a split."""
        return FidelityMeter(self.evaluation_context, self.progress)

    @property
    def evaluation_context(self) -> EvaluationContext:
        """The held-out text, and what prompts are made of."""
        return EvaluationContext.of(self.evaluation, self.data, self.checkpoint.tokenizer, self.checkpoint.config)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The checkpoint's: bytes are counted as they are served."""
        return self.checkpoint.dtype

    def check_in_memory(self) -> None:
        """Raise UsageError if the model's weights are not all in memory."""
        if self.devices.streamed:
            raise UsageError(
                "--parts methods and others about caches: they are read step by step, which needs all weights in "
                "memory.",
                "Give --offload never on a machine that can hold them, or leave these parts out.",
            )

    @property
    def context_tokens(self) -> int:
        """Tokens of the sequences whose bytes plans count."""
        return context_tokens(self.checkpoint.config, self.request.context)

    @property
    def whole_bytes(self) -> int:
        """Bytes of a token in the uncompressed cache; raises UsageError if weights are not all in memory."""
        self.check_in_memory()
        return uncompressed_kv_bytes_per_token(attention_shape(self.checkpoint.config), self.cache_dtype.itemsize)

    @property
    def mean_bytes(self) -> float:
        """Bytes of a token in the uncompressed cache, in the mean over a sequence of `context_tokens`: windows hold
        fewer."""
        shape, tokens = attention_shape(self.checkpoint.config), self.context_tokens
        return uncompressed_kv_bytes_of_sequence(shape, self.cache_dtype.itemsize, tokens) / tokens

    @cached_property
    def bench(self) -> CacheBench:
        """Measures caches on the report split, its look-ups and its copies."""
        return self.bench_in(self.cache_network)

    def bench_in(self, network: CompressibleModel) -> CacheBench:
        """Measures the same in a network of another dtype."""
        asked = primitive_metrics(self.evaluation.metric)
        prompts = [name for name in PROMPTS if name in asked]
        return self._bench(self.evaluation_context, prompts, network)

    def bench_on(self, text: Tensor) -> CacheBench:
        """Measures caches on other text, [rows, seq_len]."""
        context = EvaluationContext(
            self.evaluation, {"report": text}, self.checkpoint.tokenizer, self.checkpoint.config
        )
        return self._bench(context, [], self.cache_network)

    def _bench(self, context: EvaluationContext, prompts: list[str], network: CompressibleModel) -> CacheBench:
        samples = partial(self.calibration_rows, max(1, FIT_TOKENS // context.rows["report"].shape[1]))
        return CacheBench(network, context, prompts, self.whole_bytes, samples, self.progress)

    @cached_property
    def cache_network(self) -> CompressibleModel:
        """The model in the dtype whose caches are counted."""
        devices = replace(self.devices, dtype=self.cache_dtype)
        if devices == self.devices:
            return self.network
        return CompressibleModel(self.checkpoint, devices, workspace=self.store.folder)

    def calibration_rows(self, count: int) -> Tensor:
        """Rows [count, seq_len] of the text that is kept for calibrations."""
        documents = held_out_documents(self.evaluation, tokenizer=self.checkpoint.tokenizer)
        rows = text_sequences(documents.texts(CALIBRATION), self.checkpoint.tokenizer, self.data.report.shape[1])
        return evenly_spaced(rows, count, f"study, calibration part of {documents.description}")

    def run(self, name: str, recipe: Recipe) -> Run:
        """The run of a recipe, calibrated unless it is there.

        Raises:
            UsageError: the folder holds a run of another recipe or model.
        """
        folder = self.store.folder / "runs" / name
        if not folder.exists():
            self.progress.message(f"calibrate {name}")
            resume = PartialRun(OutputFolder.at(folder, "run")).exists
            return calibrate(
                self.checkpoint.folder,
                folder,
                recipe,
                resume=resume,
                device=self.request.device,
                dtype=self.request.dtype,
                offload=self.request.offload,
                batch_tokens=self.request.batch_tokens,
                progress=self.progress,
            )
        run = Run.open(folder)
        same_model = run.info["model"].get("shards") == self.store.settings["model"]["shards"]
        if not same_model or _without_path(run.recipe) != _without_path(recipe):
            raise UsageError(
                f"{folder}: was calibrated for another {'recipe' if same_model else 'model'}.",
                "Delete it, and the study calibrates again.",
            )
        return run

    def path(self, name: str, recipe: Recipe) -> tuple[PlanEvaluator, RankPath]:
        """The evaluator of a recipe's run, and the path of its plans; the last pair that was asked for is kept."""
        if self._open is None or self._open[0] != name:
            evaluator = PlanEvaluator(
                self.run(name, recipe),
                replace(recipe, evaluation=self.evaluation),
                self.devices,
                self.progress,
                data=lambda: self.data,
                network=lambda: self.network,
                meter=lambda: self.meter,
                context_tokens=self.context_tokens,
            )
            self._open = name, evaluator, evaluator.path
        return self._open[1:]

    def plan_of(self, name: str, size: int) -> tuple[PlanEvaluator, Plan | str]:
        """The evaluator of a recipe's run and its mildest plan of at most so many bytes a token, or why there is none.

        Bytes are the mean over a sequence of `context_tokens`; tokens that are kept exactly come on top.
        """
        evaluator, path = self.path(name, self.inputs.recipes[name])
        plan = path.at_compression(1 - size / self.mean_bytes)
        if plan is None:
            least = (1 - path.plans()[-1].stored) * self.mean_bytes
            return evaluator, f"out of reach: the least is {least:.0f} bytes"
        return evaluator, plan


def _without_path(recipe: Recipe) -> JsonObject:
    """Settings of a recipe without the path of its text, as the study's folder may be named in several ways."""
    data = recipe.to_dict()
    data["tokens"] = {key: value for key, value in data["tokens"].items() if key != "path"}
    return data
