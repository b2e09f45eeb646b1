"""Prove what a compressed checkpoint claims: integrity, numerics against the source, accuracy, bytes of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...calibration.run import Run
from ...checked import shorten
from ...checkpoint.layout import uncompressed_kv_bytes_of_sequence
from ...checkpoint.rewritten import source_at
from ...errors import RotorError, UsageError
from ...models.compressed import CompressedCheckpoint, open_model
from ...models.documents import require_tokenizer
from ...models.hardware import pick_device, pick_dtype
from ...models.layerwise import LayerwiseModel
from ...models.loading import weights_of
from ...models.projections import bounded_seq_len, context_tokens
from ...models.source import Checkpoint
from ...models.splits import LONG_SPLIT, EvaluationData, evaluation_data
from ...models.tokens import random_tokens
from ...policies import Policy, cache_policy, find_policy, packed_bytes_per_token, read_stored, stored_bytes
from ...progress import Progress, StageTimes
from ...recipe import Evaluation, Recipe, distance_overrides, load_recipe, load_stored_recipe, override, text_overrides
from ...recipe.metric_registry import METRICS
from ...recipe.settings import Compute
from ...search.compressible import CompressibleModel
from ...search.evaluation.cached import check_in_memory
from ...search.evaluation.fidelity import Fidelity, FidelityMeter
from ...search.evaluation.placement import Placement
from ...search.evaluation.prompts import EvaluationContext
from ...search.evaluation.scoring import batch_logits
from ...search.probe import full_ranks
from .integrity import Validation, check_integrity
from .tasks import compare_tasks

POLICY_TOLERANCE = 1.1
"""Measured bytes of a cache policy over planned ones, at most."""

FULL_RANK_TOLERANCE = 1e-5
"""Relative error that a full-rank rewrite may have in float32 logits."""

NUMERICS_ROWS, RANDOM_SEQ_LEN = 2, 512
"""Rows of the report split on which the full-rank rewrite is compared; without a tokenizer, random ones of this length.
"""


def validate(
    folder: str | Path,
    *,
    model: str | Path | None = None,
    run: str | Path | None = None,
    recipe: str | Recipe | None = None,
    overrides: Iterable[str] = (),
    text: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    offload: str = "auto",
    cache: str | None = None,
    measure: bool = True,
    tasks: Sequence[str] = (),
    lengths: Sequence[int] = (4096,),
    distance: int | None = None,
    shared: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Check a compressed checkpoint, or measure an uncompressed model with `cache`.

    Args:
        folder: what `rotor export` wrote, or with `cache` an uncompressed model.
        model: the source model, also for the weights of a checkpoint without; by default where rotor.json says.
        run: likewise the run folder.
        recipe, overrides: how to measure accuracy, as for calibrate, where only `evaluation` counts; by default as
            the checkpoint's recipe.yaml says, but no text is opened that only the checkpoint names.
        text: the file or folder to measure it on.
        cache: the policy that the cache follows, by name; None is the checkpoint's own, if it has one.
        measure: False leaves out accuracy, which takes most of the time: numerics are compared on random tokens.
        device, dtype, offload: as for calibrate. The cache is measured only with all weights in memory.
        tasks, lengths: benchmarks that the source and the checkpoint are asked, as of TaskSuite; of each the first
            evaluation.lm_eval_limit documents. What they say is in a new folder, FOLDER-tasks.
        distance: tokens of other text between what look-ups and copies state and what asks for it, in rows with room
            for that; by default as evaluation.filler_tokens says.
        shared: empty at first, and the same for several folders: what those of one source share is measured once.
    Raises:
        CheckpointError: the folder is not a compressed checkpoint or cannot be opened at all.
    """
    progress, times, result = progress or Progress(), StageTimes(), Validation(Path(folder))
    asked = None if cache is None else find_policy(cache)
    own = [*text_overrides(text, ("evaluation",)), *distance_overrides(distance), *overrides]
    if asked is not None and not isinstance(plain := open_model(folder), CompressedCheckpoint):
        if tasks or not measure:
            raise UsageError("an uncompressed model with --cache is only measured.", "Drop --tasks and --no-measure.")
        measured_by = override(load_recipe(recipe or "rotor"), own, ("evaluation",))
        with times.stage("accuracy"):
            compute = Compute(device, dtype, offload)
            result.summary = _with_policy(plain, str(cache), asked, measured_by, compute, progress)
        result.seconds = times.seconds
        return result
    if asked is not None and asked.needs_samples:
        raise UsageError(
            f"--cache {cache}: cache policy {asked.method} is fitted when a checkpoint is exported, and stored in it.",
            f"`rotor export RUN -o OUT --accuracy 0.99 --cache {cache}` writes one; leave --cache out to "
            "validate what it stores.",
        )
    with times.stage("integrity"), source_at(model):
        checkpoint = check_integrity(result, progress)
    if not result.damaged:
        stored = load_stored_recipe(checkpoint.folder)
        spec = override(load_recipe(recipe or stored), own, ("evaluation",)).evaluation
        withheld = "" if measure else "not measured (--no-measure)"
        named = recipe is not None or any(change.partition("=")[0].strip() == "evaluation.path" for change in own)
        if spec.source == "text" and not named:  # any file of this machine
            hint = "which is opened only if you do: --set evaluation.path=..."
            withheld = withheld or f"recipe.yaml names {shorten(spec.path)}, {hint}"
        with source_at(model):
            numerics = _Numerics(
                result,
                checkpoint,
                _find(model, checkpoint.source_folder, Checkpoint),
                _find(run, checkpoint.run_folder, Run.open),
                stored,
                spec,
                withheld,
                Compute(device, dtype, offload),
                read_stored(getattr(checkpoint.section, "cache", None)) if cache is None else asked,
                {} if shared is None else shared,
                progress,
            )
            if tasks:
                with times.stage("tasks"):
                    numerics.compare_tasks(tasks, lengths, Path(f"{folder}-tasks"))
            with times.stage("numerics and accuracy"):
                numerics.check()
    report = checkpoint.report
    about = {name: report.get(name) for name in ("recipe", "compression", "kv_bytes_per_token")}
    result.summary, result.seconds = about | result.summary, times.seconds
    return result


def _find(given: str | Path | None, recorded: Path, opener: Callable) -> Any:
    """What `opener` makes of a path given by the user or recorded in rotor.json; an error text if it is not there."""
    try:
        return opener(recorded if given is None else Path(given))
    except RotorError as error:
        if given is not None:
            raise
        return error.message


@dataclass
class _Numerics:
    """The checks of one folder that need a forward pass. A source or run that was not found is the reason as text.

    withheld: why accuracy is not measured, or nothing.
    """

    result: Validation
    checkpoint: CompressedCheckpoint
    source: Checkpoint | str
    run: Run | str
    recipe: Recipe
    spec: Evaluation
    withheld: str
    compute: Compute
    policy: Policy | None
    shared: dict[str, Any]
    progress: Progress

    def check(self) -> None:
        result, source, run = self.result, self.source, self.run
        data = self._text()
        config = self.checkpoint.config
        if data is None:
            rows = random_tokens(NUMERICS_ROWS, bounded_seq_len(RANDOM_SEQ_LEN, config), config, None, seed=0)
        else:
            rows = data.report
        place = self._placement()
        no_run = f"run folder not found ({run}); pass --run"
        meter = None
        if isinstance(source, str):
            for name in ("source unchanged", "full-rank rewrite", "accuracy target"):
                result.skip(name, f"source model not found ({source}); pass --model")
        else:
            self._check_source(source)
            if isinstance(run, Run):
                with self.progress.task("full-rank rewrite", None, ""):
                    error = _full_rank_error(source, run, rows[:NUMERICS_ROWS], place.streamed)
                detail = f"relative error of float32 logits {error:.1e}"
                result.add("full-rank rewrite", error <= FULL_RANK_TOLERANCE, detail)
            else:
                result.skip("full-rank rewrite", no_run)
            if data is None:
                result.skip("accuracy target", self.withheld or "no tokenizer to read text with")
            elif self.policy is not None and place.streamed:
                result.skip("accuracy target", f"the cache policy {self.policy.method} needs all weights in memory")
            else:
                spec, policy, accuracy = self.spec, self.policy, self.checkpoint.report["accuracy"]
                # What the export's search left out counts for as long as it is measured as it was there.
                searched = accuracy.get("left_out", {}).get("search") if spec == self.recipe.evaluation else None
                key = source.folder.resolve(), data.sha256, spec, place, repr(policy), repr(searched)
                meter = self._once(
                    "source", key, lambda: _measured(source, spec, data, place, policy, self.progress, searched)[0]
                )
        with self.progress.task("load model", None, ""):
            compressed = LayerwiseModel(weights_of(self.checkpoint, place.device, place.dtype, place.streamed))
        if meter is not None and data is not None:
            self._check_accuracy(meter, compressed)
            result.summary["accuracy"]["data"] = data.description
            recorded = self.checkpoint.report["accuracy"]["data_sha256"]
            result.summary["same_data_as_export"] = data.sha256 == recorded
        self._measure_cache(compressed, rows[:1])

    def compare_tasks(self, names: Sequence[str], lengths: Sequence[int], out: Path) -> None:
        """Raises UsageError without a source, and as tasks.compare_tasks."""
        if isinstance(self.source, str):
            raise UsageError(f"--tasks: source model not found ({self.source}).", "Pass --model.")
        place, spec = self._placement(), self.spec
        asked = self.checkpoint, self.source, place, self.policy, names, lengths, spec, out, self.progress
        self.result.summary["tasks"] = {"folder": str(out), "results": [asdict(row) for row in compare_tasks(*asked)]}

    def _text(self) -> EvaluationData | None:
        """The held-out text; None where accuracy cannot be measured."""
        source = self.source
        if isinstance(source, str) or self.withheld or source.tokenizer is None:
            return None
        excluded = tuple(self.checkpoint.report["accuracy"].get("excluded_documents", ()))
        key, given = (source.folder.resolve(), self.spec, excluded), (source.config, source.tokenizer, excluded)
        with self.progress.task("load text", None, ""):
            return self._once("text", key, lambda: evaluation_data(self.spec, *given))

    def _once(self, kind: str, key: Any, measure: Callable[[], Any]) -> Any:
        """What was measured for an earlier folder, if its `key` was the same: of each kind the last is kept."""
        if kind not in self.shared or self.shared[kind][0] != key:
            self.shared.pop(kind, None)  # frees its memory before the next one takes some
            self.shared[kind] = key, measure()
        return self.shared[kind][1]

    def _placement(self) -> Placement:
        """Choose by what the source takes, the larger of the two models, which are loaded one after the other."""
        if isinstance(self.source, Checkpoint):
            return Placement.choose(self.source, self.recipe, self.compute, self.progress)
        device = pick_device(self.compute.device)
        dtype = pick_dtype(self.compute.dtype, self.checkpoint.dtype, device)
        return Placement(device, dtype, self.compute.offload == "always")

    def _check_source(self, source: Checkpoint) -> None:
        """The source's files are those that were calibrated."""
        recorded = self.checkpoint.report["source"]
        expected = {**recorded["shards"], **(recorded.get("files") or {})}
        with self.progress.task("check model", None, ""):
            problems = source.changes(expected)
        fine = f"{len(expected)} file(s), {len(source.files)} of them shards"
        self.result.add_problems("source unchanged", problems, fine)

    def _check_accuracy(self, meter: FidelityMeter, compressed: LayerwiseModel) -> None:
        """The compressed model against the source over the report split: every ratio, KL, agreement."""
        result, target, base = self.result, self.checkpoint.report["accuracy"]["target"], meter.base["report"]
        found = meter.measure(compressed, "report")
        result.summary["accuracy"] = _accuracy(meter, found, target)
        if LONG_SPLIT in meter.base:
            result.summary["accuracy"][LONG_SPLIT] = meter.measure(compressed, LONG_SPLIT).values
        text, chance = "{} {:.4f} [{:.4f}, {:.4f}]".format(meter.metric, found.accuracy, *found.interval), ""
        if base.get("at_chance"):
            result.summary["accuracy"]["at_chance"] = True
            chance = "; the source is at chance on this text, where ratios to it mean nothing"
        if target is None:
            result.skip("accuracy target", f"on the report split none was set; {text}{chance}")
        else:
            met, why = found.against(target)
            text = f"on the report split {text}, target {target}{why and ': '}{why}{chance}"
            result.add("accuracy target", met, text)

    def _measure_cache(self, network: LayerwiseModel, rows: Tensor) -> None:
        """KV bytes per token that a forward pass in the checkpoint's dtype leaves in the cache, against the plan."""
        result, policy, size = self.result, self.policy, self.checkpoint.report["kv_bytes_per_token"]
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
            removed = 1 - self._share_of_sequence(network, by_layer)
        else:
            measured = stored_bytes(cache) / rows.numel()
            removed = 1 - measured / size["before"]
            planned = packed_bytes_per_token(policy, self.checkpoint.layouts, model.dtype, rows.shape[1])
            about = {"policy": policy.as_dict(), "tokens": rows.shape[1], "kv_bytes_per_token": planned}
            result.summary["cache"] = about
        result.summary["measured_kv_bytes_per_token"] = measured
        result.summary["measured_compression"] = round(removed, 6)
        # SqueezeAttention's budgets are rounded, and KVQuant's outliers are by the text.
        fits = measured == planned if policy is None else measured <= POLICY_TOLERANCE * planned
        result.add("KV bytes per token", fits, f"measured {measured:g}, planned {planned:g}")

    def _share_of_sequence(self, network: LayerwiseModel, by_layer: Sequence[float]) -> float:
        """Share of the bytes of a sequence of the context that is served, by those of a token in each layer."""
        report, shape = self.checkpoint.report, network.shape
        held = report.get("kv_bytes_of_sequence")
        tokens = context_tokens(network.config) if held is None else held["tokens"]
        before = uncompressed_kv_bytes_of_sequence(shape, report["kv_bytes_per_token"]["element_bytes"], tokens)
        return sum(own * kept for own, kept in zip(by_layer, shape.held_tokens(tokens), strict=True)) / before


def _measured(
    source: Checkpoint,
    spec: Evaluation,
    data: EvaluationData,
    place: Placement,
    policy: Policy | None,
    progress: Progress,
    searched: dict[str, str] | None = None,
) -> tuple[FidelityMeter, LayerwiseModel]:
    """What compares with a source model on the report split, and that model.

    Args:
        searched: what the search split left out, with why, if that is known.
    """
    with progress.task("load model", None, ""):
        base = LayerwiseModel(weights_of(source, place.device, place.dtype, place.streamed))
    if policy is not None:
        check_in_memory(base, policy)
    meter = FidelityMeter(EvaluationContext(spec, data.sequences, source.tokenizer, source.config), progress, policy)
    meter.left_out |= {} if searched is None else {"search": searched}
    for split in ("report", LONG_SPLIT):
        if split in data.sequences:
            meter.measure_base(base, split)
    return meter, base


def _accuracy(meter: FidelityMeter, found: Fidelity, target: float | None) -> dict[str, Any]:
    """What is said of the report split."""
    base, rows = meter.base["report"], meter.text("report")
    return {
        "metric": meter.metric,
        "value": found.accuracy,
        "interval_95": list(found.interval),
        "target": target,
        **found.values,
        **{f"base_{name}": base[name] for name in base if name in METRICS},
        "left_out": meter.left_out["report"],
        "tokens": rows.shape[0] * (rows.shape[1] - 1),
    }


def _with_policy(
    source: Checkpoint, cache: str, policy: Policy, recipe: Recipe, compute: Compute, progress: Progress
) -> dict[str, Any]:
    """Accuracy and bytes of an uncompressed model's cache by a policy, fitted on the search split, against a plain one.

    Raises:
        DataError: no tokenizer. UsageError: not all weights fit in memory, or the policy cannot serve the model.
    """
    require_tokenizer(source.tokenizer)
    place, spec = Placement.choose(source, recipe, compute, progress), recipe.evaluation
    data = evaluation_data(spec, source.config, source.tokenizer)
    meter, network = _measured(source, spec, data, place, policy, progress)
    meter.policy = meter.fitted_policy(network)
    accuracy = _accuracy(meter, meter.measure(network, "report"), None) | {"data": data.description}
    model, rows, sizes = network.model.to(source.config.dtype or torch.float32), data.report[:1].to(place.device), []
    for used in (None, meter.policy):
        with torch.inference_mode(), cache_policy(model, used):
            sizes.append(stored_bytes(model(rows, use_cache=True).past_key_values) / rows.numel())
    return {
        "recipe": cache,
        "compression": {"stored": round(1 - sizes[1] / sizes[0], 6)},
        "kv_bytes_per_token": {"before": round(sizes[0]), "after": sizes[1], "tokens": rows.shape[1]},
        "accuracy": accuracy,
    }


def _full_rank_error(source: Checkpoint, run: Run, rows: Tensor, streamed: bool) -> float:
    """What a rewrite that keeps all columns changes of float32 logits."""
    bases = run.bases()
    cpu = torch.device("cpu")
    network = CompressibleModel(source, cpu, torch.float32, rewrite_dtype=torch.float32, streamed=streamed)
    expected = batch_logits(network, rows)
    network.compress(bases, [[full_ranks(b)] * len(b.qk.encode) for b in bases])
    return float((batch_logits(network, rows) - expected).norm() / expected.norm())


def cache_bytes_per_token(cache: Any) -> list[float]:
    """Bytes of transformers' own cache for a token of each layer; one with a sliding window drops the older ones.

    Args:
        cache: of layers [batch_size, heads, tokens, width], holding at least one token.
    """
    return [
        (layer.keys.nbytes + layer.values.nbytes) / (layer.keys.shape[0] * layer.keys.shape[2])
        for layer in cache.layers
    ]
