"""Prove what a compressed checkpoint claims: integrity, numerics against the source, accuracy, bytes of cache."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ...calibration.run import Run
from ...checkpoint.families import attention_shape
from ...checkpoint.rewritten import source_at
from ...checkpoint.section import is_compressed
from ...checkpoint.sizes import CacheSize, share_removed
from ...errors import RotorError, UsageError
from ...models.compressed import CompressedCheckpoint, open_model
from ...models.compressible import CompressibleModel
from ...models.documents import require_tokenizer
from ...models.hardware import DevicePlan
from ...models.layerwise import LayerwiseModel
from ...models.sequences import bounded_seq_len
from ...models.source import CHANGED, Checkpoint
from ...models.splits import EvaluationData, evaluation_data
from ...models.tokens import random_tokens
from ...options import with_fields_of
from ...policies import Policy, cache_policy, find_policy, packed_bytes_per_token, read_stored, stored_bytes
from ...progress import Progress, StageTimes
from ...recipe.reading import load_recipe, load_stored_recipe, override
from ...recipe.recipe import Recipe
from ...recipe.requests import ValidationRequest
from ...recipe.sections import Evaluation
from ...search.evaluation.cached import check_in_memory
from ...search.evaluation.estimate import evaluation_plan
from ...search.evaluation.fidelity import FidelityMeter
from ...search.evaluation.prompts import EvaluationContext
from ...search.evaluation.scoring import batch_logits
from .integrity import Validation, check_integrity
from .tasks import compare_tasks

T = TypeVar("T")

POLICY_TOLERANCE = 1.1
"""Measured bytes of a cache policy over planned ones, at most."""

FULL_RANK_TOLERANCE = 1e-5
"""Relative error that a full-rank rewrite may have in float32 logits."""

NUMERICS_ROWS, RANDOM_SEQ_LEN = 2, 512
"""Rows of the report split on which the full-rank rewrite is compared; without a tokenizer, random ones of this length.
"""


def run_validation(request: ValidationRequest) -> Validation:
    """Check a compressed checkpoint, or measure an uncompressed model with `cache`.

    The cache is measured only with all weights in memory.

    Raises:
        CheckpointError: the folder is not a compressed checkpoint or cannot be opened at all.
    """
    progress = request.progress or Progress()
    times = StageTimes()
    result = Validation(Path(request.folder))
    policy = None if request.cache is None else find_policy(request.cache)
    overrides = request.evaluation_overrides
    if policy is not None and not isinstance(plain := open_model(request.folder), CompressedCheckpoint):
        if request.tasks or not request.measure:
            raise UsageError("an uncompressed model with --cache is only measured.", "Drop --tasks and --no-measure.")
        recipe = override(load_recipe(request.recipe or "rotor"), overrides, ("evaluation",))
        with times.stage("accuracy"):
            _measure_with_policy(result, plain, policy, recipe, request, progress)
        result.seconds = times.seconds
        return result
    if policy is not None and policy.needs_samples:
        raise UsageError(
            f"--cache {request.cache}: cache policy {policy.method} is fitted when a checkpoint is exported, and "
            "stored in it.",
            f"`rotor export RUN -o OUT --accuracy 0.99 --cache {request.cache}` writes one; leave --cache out to "
            "validate what it stores.",
        )
    with times.stage("integrity"), source_at(request.model):
        checkpoint = check_integrity(result, progress)
    if not result.damaged:
        stored = load_stored_recipe(checkpoint.folder)
        spec = override(load_recipe(request.recipe or stored), overrides, ("evaluation",)).evaluation
        withheld = "" if request.measure else "not measured (--no-measure)"
        changed = {change.partition("=")[0].strip() for change in overrides}
        named = request.recipe is not None or "evaluation.path" in changed
        if spec.source == "text" and not named:  # any file of this machine
            path = str(spec.path)
            named_so = shlex.quote(path) if path.isprintable() and len(path) < 300 else "FILE"
            withheld = withheld or f"recipe.yaml names a text, which is opened only if you name it: --text {named_so}"
        with source_at(request.model):
            numerics = _Numerics(
                result,
                checkpoint,
                _find(request.model, checkpoint.source_folder, Checkpoint),
                _find(request.run, checkpoint.run_folder, Run.open),
                stored,
                spec,
                withheld,
                request,
                read_stored(getattr(checkpoint.section, "cache", None)) if request.cache is None else policy,
                request.shared,
                progress,
            )
            if request.tasks:
                with times.stage("tasks"):
                    numerics.compare_tasks(request.tasks, request.lengths, Path(f"{request.folder}-tasks"))
            with times.stage("numerics and accuracy"):
                numerics.check()
    report = checkpoint.report
    about = {name: report[name] for name in ("recipe", "compression", "kv_bytes_per_token")}
    result.summary = about | result.summary
    result.seconds = times.seconds
    return result


validate = with_fields_of(ValidationRequest, run_validation, "validate")


def _find(given: str | Path | None, recorded: Path, opener: Callable[[Path], T]) -> T | str:
    """Open a path that the user gave, else the one in rotor.json; an error text if the latter is not there."""
    try:
        return opener(recorded if given is None else Path(given))
    except RotorError as error:
        if given is not None:
            raise
        return error.message


@dataclass
class _Numerics:
    """The checks of one folder that need a forward pass.

    source, run: opened, or why they could not be, as text.

    withheld: why accuracy is not measured, or nothing.
    """

    result: Validation
    checkpoint: CompressedCheckpoint
    source: Checkpoint | str
    run: Run | str
    recipe: Recipe
    spec: Evaluation
    withheld: str
    options: ValidationRequest
    policy: Policy | None
    shared: dict[str, tuple[object, object]]
    progress: Progress

    def check(self) -> None:
        result = self.result
        source = self.source
        run = self.run
        if isinstance(source, Checkpoint):
            self._check_source(source)
        data = self._text()
        config = self.checkpoint.config
        if data is None:
            rows = random_tokens(NUMERICS_ROWS, bounded_seq_len(RANDOM_SEQ_LEN, config), config, None, seed=0)
        else:
            rows = data.report[:, :RANDOM_SEQ_LEN]
        devices = self._devices()
        no_run = f"run folder not found ({run}); pass --run"
        meter = None
        if isinstance(source, str):
            for name in ("source unchanged", "full-rank rewrite", "accuracy target"):
                result.skip(name, f"source model not found ({source}); pass --model")
        else:
            if isinstance(run, Run):
                with self.progress.task("full-rank rewrite", None, ""):
                    error = _full_rank_error(source, run, rows[:NUMERICS_ROWS], devices.streamed)
                detail = f"relative error of float32 logits {error:.1e}"
                result.add("full-rank rewrite", error <= FULL_RANK_TOLERANCE, detail)
            else:
                result.skip("full-rank rewrite", no_run)
            if data is None:
                result.skip("accuracy target", self.withheld or "no tokenizer to read text with")
            elif self.policy is not None and devices.streamed:
                result.skip("accuracy target", f"the cache policy {self.policy.method} needs all weights in memory")
            else:
                spec = self.spec
                policy = self.policy
                accuracy = self.checkpoint.report["accuracy"]
                # What the export's search left out counts for as long as it is measured as it was there.
                searched = accuracy["left_out"].get("search") if spec == self.recipe.evaluation else None
                key = source.folder.resolve(), data.sha256, spec, devices, repr(policy), repr(searched)
                meter = self._once(
                    "source", key, lambda: _measured(source, spec, data, devices, policy, self.progress, searched)[0]
                )
        with self.progress.task("load model", None, ""):
            compressed = LayerwiseModel(devices.weights(self.checkpoint))
        if meter is not None and data is not None:
            self._check_accuracy(meter, compressed, data.description)
            recorded = self.checkpoint.report["accuracy"]["data_sha256"]
            result.summary["same_data_as_export"] = data.sha256 == recorded
        self._measure_cache(compressed, rows[:1])

    def compare_tasks(self, names: Sequence[str], lengths: Sequence[int], out: Path) -> None:
        """Raises UsageError without a source, and as tasks.compare_tasks."""
        if isinstance(self.source, str):
            raise UsageError(f"--tasks: source model not found ({self.source}).", "Pass --model.")
        devices, spec = self._devices(), self.spec
        asked = self.checkpoint, self.source, devices, self.policy, names, lengths, spec, out, self.progress
        self.result.summary["tasks"] = {"folder": str(out), "results": [asdict(row) for row in compare_tasks(*asked)]}

    def _text(self) -> EvaluationData | None:
        """The held-out text; None where accuracy cannot be measured."""
        source = self.source
        if isinstance(source, str) or self.withheld or source.tokenizer is None:
            return None
        known = {*self.checkpoint.report["accuracy"]["excluded_documents"]}
        if isinstance(self.run, Run):
            known |= self.run.calibrated_documents
        excluded = tuple(sorted(known))
        key = (source.folder.resolve(), self.spec, excluded)
        given = (source.config, source.tokenizer, excluded)
        with self.progress.task("load text", None, ""):
            data = self._once("text", key, lambda: evaluation_data(self.spec, *given))
        if data.excluded:
            self.progress.message(f"text: {len(data.excluded)} document(s) left out, which were calibrated on")
        return data

    def _once(self, kind: str, key: object, measure: Callable[[], T]) -> T:
        """The result for an earlier folder, if its `key` was the same; the last result of each kind is kept."""
        if kind not in self.shared or self.shared[kind][0] != key:
            self.shared.pop(kind, None)  # frees its memory before the next one takes some
            self.shared[kind] = key, measure()
        return cast(T, self.shared[kind][1])

    def _devices(self) -> DevicePlan:
        """Choose by the memory of the source, the larger of the two models, which are loaded one after the other."""
        if isinstance(self.source, Checkpoint):
            return evaluation_plan(self.source, self.recipe, self.options, self.progress)
        return DevicePlan.choose(self.options, self.checkpoint.dtype)

    def _check_source(self, source: Checkpoint) -> None:
        """Check that the source's files are those that were calibrated.

        Raises:
            UsageError: it is another model, to which a comparison would mean nothing.
        """
        recorded = self.checkpoint.report["source"]
        expected = {**recorded["shards"], **recorded["files"]}
        with self.progress.task("check model", None, ""):
            problems = source.changes(expected)
            same = set(source.files) & set(recorded["shards"])
            changed = same and not same - {Path(problem.removesuffix(CHANGED)).name for problem in problems}
        if (
            is_compressed(source.config_dict)
            or attention_shape(source.config) != self.checkpoint.shape
            or (self.options.model is not None and (changed or not same))
        ):
            made = self.checkpoint.folder
            raise UsageError(
                f"{source.folder} is not the model that {made} was made from, {recorded['name']}.",
                "Give that model's folder or hub id: --model MODEL. Without it, --no-measure checks the rest.",
            )
        fine = f"{len(expected)} file(s), {len(source.files)} of them shards"
        self.result.add_problems("source unchanged", problems, fine)

    def _check_accuracy(self, meter: FidelityMeter, compressed: LayerwiseModel, data: str) -> None:
        """Compare the compressed model with the source over the report split: every ratio, KL, agreement."""
        result = self.result
        target = self.checkpoint.report["accuracy"]["target"]
        measured = {"report": meter.measure(compressed, "report")}
        result.accuracy = meter.accuracy(measured, target, data)
        result.summary["accuracy"] = result.accuracy.summary()
        text = f"{meter.metric} {measured['report']}"
        chance = ""
        if meter.base["report"].get("at_chance"):
            chance = "; the source is at chance on this text, where ratios to it mean nothing"
        if target is None:
            result.skip("accuracy target", f"on the report split none was set; {text}{chance}")
        else:
            met, why = result.accuracy.against_target()
            text = f"on the report split {text}, target {target}{why and ': '}{why}{chance}"
            result.add("accuracy target", met, text)

    def _measure_cache(self, network: LayerwiseModel, rows: Tensor) -> None:
        """Compare KV bytes per token after a forward pass in the checkpoint's dtype with those planned."""
        result = self.result
        policy = self.policy
        size = self.checkpoint.report["kv_bytes_per_token"]
        if network.source.streamed:
            result.skip("KV bytes per token", "measured only with all weights in memory (--offload never)")
            return
        model = network.model.to(self.checkpoint.dtype)
        with torch.inference_mode(), cache_policy(model, policy):
            cache = model(rows.to(model.device), use_cache=True).past_key_values
        planned: float = size["after"]
        if policy is None:
            by_layer = cache_bytes_per_token(cache)
            measured = sum(by_layer)
            removed = self._removed(network, by_layer)
        else:
            measured = stored_bytes(cache) / rows.numel()
            removed = share_removed(size["before"], measured)
            planned = packed_bytes_per_token(policy, self.checkpoint.layouts, model.dtype, rows.shape[1])
            about = {"policy": policy.as_dict(), "tokens": rows.shape[1], "kv_bytes_per_token": planned}
            result.summary["cache"] = about
        result.summary["measured_kv_bytes_per_token"] = measured
        result.summary["measured_compression"] = round(removed, 6)
        # SqueezeAttention's budgets are rounded, and KVQuant's outliers are by the text.
        fits = measured == planned if policy is None else measured <= POLICY_TOLERANCE * planned
        result.add("KV bytes per token", fits, f"measured {measured:g}, planned {planned:g}")

    def _removed(self, network: LayerwiseModel, by_layer: Sequence[float]) -> float:
        """Share removed of a sequence of the served context, from the bytes of a token in each layer."""
        tokens = self.checkpoint.report["kv_bytes_of_sequence"]["tokens"]
        return CacheSize.of_rows(by_layer, network.shape, self.checkpoint.dtype.itemsize).removed(tokens)


def _measured(
    source: Checkpoint,
    spec: Evaluation,
    data: EvaluationData,
    devices: DevicePlan,
    policy: Policy | None,
    progress: Progress,
    searched: dict[str, str] | None = None,
) -> tuple[FidelityMeter, LayerwiseModel]:
    """The meter that compares with a source model on the report split, and that model.

    Args:
        searched: what the search split left out, with why, if that is known.
    """
    with progress.task("load model", None, ""):
        base = LayerwiseModel(devices.weights(source))
    if policy is not None:
        check_in_memory(base, policy)
    meter = FidelityMeter(EvaluationContext.of(spec, data, source.tokenizer, source.config), progress, policy)
    meter.left_out |= {} if searched is None else {"search": searched}
    meter.measure_base(base, "report")
    return meter, base


def _measure_with_policy(
    result: Validation,
    source: Checkpoint,
    policy: Policy,
    recipe: Recipe,
    request: ValidationRequest,
    progress: Progress,
) -> None:
    """Measure an uncompressed model's cache by a policy, fitted on the search split, against a plain one.

    Raises:
        DataError: no tokenizer. UsageError: not all weights fit in memory, or the policy cannot serve the model.
    """
    require_tokenizer(source.tokenizer)
    devices = evaluation_plan(source, recipe, request, progress)
    spec = recipe.evaluation
    data = evaluation_data(spec, source.config, source.tokenizer)
    meter, network = _measured(source, spec, data, devices, policy, progress)
    meter.policy = meter.fitted_policy(network)
    result.accuracy = meter.accuracy({"report": meter.measure(network, "report")}, None, data.description)
    model = network.model.to(source.dtype)
    rows = data.report[:1].to(devices.device)
    sizes = []
    for used in (None, meter.policy):
        with torch.inference_mode(), cache_policy(model, used):
            sizes.append(stored_bytes(model(rows, use_cache=True).past_key_values) / rows.numel())
    result.summary = {
        "recipe": str(request.cache),
        "compression": {"stored": round(1 - sizes[1] / sizes[0], 6)},
        "kv_bytes_per_token": {"before": round(sizes[0]), "after": sizes[1], "tokens": rows.shape[1]},
        "accuracy": result.accuracy.summary(),
    }


def _full_rank_error(source: Checkpoint, run: Run, rows: Tensor, streamed: bool) -> float:
    """Relative error of float32 logits after a rewrite that keeps all columns."""
    bases = run.bases()
    cpu = torch.device("cpu")
    network = CompressibleModel(source, DevicePlan(cpu, torch.float32, streamed), rewrite_dtype=torch.float32)
    expected = batch_logits(network, rows)
    exact = run.recipe.exact.tokens if run.shape.needs_exact else None
    network.compress(bases, [[b.full_ranks] * b.num_groups for b in bases], exact)
    with network.decoding():
        rewritten = batch_logits(network, rows)
    return float((rewritten - expected).norm() / expected.norm())


def cache_bytes_per_token(cache: Any) -> list[float]:
    """Bytes of transformers' own cache for a token of each layer with attention; windows drop the older tokens.

    Args:
        cache: of layers [batch_size, heads, tokens, width], holding at least one token.
    """
    return [
        (layer.keys.nbytes + layer.values.nbytes) / (layer.keys.shape[0] * layer.keys.shape[2])
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None  # others keep a state, or nothing
    ]
