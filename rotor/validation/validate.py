"""Prove what a compressed checkpoint claims: integrity, numerics against the source, accuracy, bytes of cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration.run import Run
from ..data.splits import EvaluationData, evaluation_data
from ..data.tokens import random_tokens
from ..errors import RotorError, UsageError
from ..evaluation.fidelity import Fidelity, FidelityMeter
from ..evaluation.metrics import EvaluationContext
from ..evaluation.placement import Placement
from ..evaluation.scoring import batch_logits, logit_errors
from ..format.channels import Channels, Numbers
from ..format.file_names import RECIPE
from ..format.schemas import CheckpointInfo, ModelInfo
from ..models.checkpoint import Checkpoint
from ..models.compressed import CompressedCheckpoint
from ..models.hardware import pick_device, pick_dtype
from ..models.layerwise import LayerwiseModel
from ..models.loading import weights_of
from ..models.projections import longest_row
from ..policies import Policy, cache_policy, find_policy, packed_bytes_per_token, read_stored, stored_bytes
from ..progress import Progress, StageTimes
from ..recipe import Recipe, load_recipe, text_overrides
from ..recipe.metric_registry import METRICS
from ..recipe.settings import Compute
from ..rewriting.compressible import CompressibleModel
from ..runtime.cache_size import cache_bytes_per_token
from ..runtime.families import FAMILIES
from ..search.probe import full_ranks
from .integrity import Validation, check_integrity
from .trusted import TrustedEvaluation, trusted_evaluation

FULL_RANK_TOLERANCE = 1e-5
"""Relative error that a full-rank rewrite may have in float32 logits."""

IDENTITY_TOLERANCE = 1e-6
"""Largest deviation of encode decode^T (in float64, at full rank) from the identity."""

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
    digest: str | None = None,
    cache: str | None = None,
    measure: bool = True,
    progress: Progress | None = None,
) -> Validation:
    """Check a compressed checkpoint.

    Args:
        folder: what `rotor export` wrote.
        model: the source model; by default where rotor.json says. run: likewise the run folder.
        recipe, overrides: how to measure accuracy, as for calibrate, where only `evaluation` counts; by default as
            the checkpoint's recipe.yaml says, but no text or task is opened that only the checkpoint names.
        text: the file or folder to measure it on.
        cache: the policy that the cache follows, by name; None is the checkpoint's own, if it has one.
        digest: what export printed; the manifest must have it. Without, the files are only compared with the manifest.
        measure: False leaves out accuracy, which takes most of the time: numerics are compared on random tokens.
        device, dtype, offload: as for calibrate. The cache is measured only with all weights in memory.
    Raises:
        CheckpointError: the folder is not a compressed checkpoint or cannot be opened at all.
    """
    progress = progress or Progress()
    times = StageTimes()
    result = Validation(Path(folder))
    asked = None if cache is None else find_policy(cache)
    if asked is not None and asked.needs_samples:
        raise UsageError(
            f"--cache {cache}: cache policy {asked.method} is fitted when a checkpoint is exported, and stored in it.",
            f"`rotor export RUN -o OUT --accuracy 0.99 --cache {cache}` writes one; leave --cache out to "
            "validate what it stores.",
        )
    with times.stage("integrity"):
        checkpoint = check_integrity(result, progress, digest)
    report = checkpoint.report
    if not result.damaged:
        source = _find(model, checkpoint.source_folder, Checkpoint)
        opened = _find(run, checkpoint.run_folder, Run.open)
        with times.stage("numerics and accuracy"):
            stored = load_recipe(str(checkpoint.folder / RECIPE))
            trusted = trusted_evaluation(stored, recipe, [*text_overrides(text, ("evaluation",)), *overrides])
            if not measure:
                trusted = replace(trusted, withheld="not measured (--no-measure)")
            compute = Compute(device, dtype, offload)
            policy = read_stored(getattr(checkpoint.section, "cache", None)) if cache is None else asked
            _against_source(result, checkpoint, report, source, opened, stored, trusted, compute, policy, progress)
    result.summary = {
        "recipe": report.get("recipe"),
        "compression": report.get("compression"),
        "kv_bytes_per_token": report.get("kv_bytes_per_token"),
        **result.summary,
    }
    result.seconds = times.seconds
    return result


def _find(given: str | Path | None, recorded: Path, opener: Callable) -> Any:
    """What `opener` makes of a path given by the user or recorded in rotor.json; an error text if it is not there."""
    try:
        return opener(recorded if given is None else Path(given))
    except RotorError as error:
        if given is not None:
            raise
        return error.message


def _against_source(
    result: Validation,
    checkpoint: CompressedCheckpoint,
    report: CheckpointInfo,
    source: Checkpoint | str,
    run: Run | str,
    recipe: Recipe,
    trusted: TrustedEvaluation,
    compute: Compute,
    policy: Policy | None,
    progress: Progress,
) -> None:
    """Everything that needs a forward pass."""
    data = None
    if not trusted.withheld:
        with progress.task("load text", None, ""):
            data = _text(checkpoint, report, trusted)
    rows = _random_rows(checkpoint) if data is None else data.report
    place = _placement(source, checkpoint, recipe, compute, progress)
    _check_stored_bases(result, checkpoint)
    if isinstance(run, str):
        result.skip("bases at full rank", f"run folder not found ({run}); pass --run")
    else:
        with progress.task("bases", None, ""):
            _check_bases(result, run)
    meter = None
    if isinstance(source, str):
        why = f"source model not found ({source}); pass --model"
        for name in ("source unchanged", "full-rank rewrite", "accuracy target"):
            result.skip(name, why)
    else:
        with progress.task("check model", None, ""):
            _check_source(result, source, report["source"])
        if isinstance(run, str):
            result.skip("full-rank rewrite", f"run folder not found ({run}); pass --run")
        else:
            with progress.task("full-rank rewrite", None, ""):
                _check_full_rank(result, source, run, rows[:NUMERICS_ROWS], place.streamed)
        if data is None:
            result.skip("accuracy target", trusted.withheld or "no tokenizer to read text with")
        elif policy is not None and place.streamed:
            result.skip("accuracy target", f"the cache policy {policy.method} needs all weights in memory")
        else:
            context = EvaluationContext(trusted.spec, data.rows, checkpoint.tokenizer, checkpoint.config)
            meter = _measured_source(source, place, context, progress, policy)
    with progress.task("load model", None, ""):
        weights = weights_of(checkpoint, place.device, place.dtype, place.streamed)
    compressed = LayerwiseModel(weights)
    if meter is not None and data is not None:
        _check_accuracy(result, meter, compressed, report)
        result.summary["accuracy"]["data"] = data.description
        result.summary["same_data_as_export"] = data.sha256 == report["accuracy"]["data_sha256"]
    _measure_cache(result, compressed, checkpoint, report, rows[:1], policy)


def _text(
    checkpoint: CompressedCheckpoint, report: CheckpointInfo, trusted: TrustedEvaluation
) -> EvaluationData | None:
    """The held-out text; None where there is no tokenizer to read it with."""
    if checkpoint.tokenizer is None:
        return None
    excluded = report["accuracy"].get("excluded_documents", ())
    return evaluation_data(trusted.spec, checkpoint.config, checkpoint.tokenizer, excluded)


def _random_rows(checkpoint: CompressedCheckpoint) -> Tensor:
    """What stands in for text where only numerics and the size of the cache are looked at."""
    seq_len = longest_row(RANDOM_SEQ_LEN, checkpoint.config)
    return random_tokens(NUMERICS_ROWS, seq_len, checkpoint.config, None, seed=0)


def _check_source(result: Validation, source: Checkpoint, recorded: ModelInfo) -> None:
    """The source's files are those that were calibrated."""
    expected = {**recorded["shards"], **(recorded.get("files") or {})}
    problems = source.changes(expected)
    result.judge("source unchanged", problems, f"{len(expected)} file(s), {len(source.files)} of them shards")


def _placement(
    source: Checkpoint | str, checkpoint: Checkpoint, recipe: Recipe, compute: Compute, progress: Progress
) -> Placement:
    """By what the source takes, the larger of the two, which are loaded one after the other."""
    if isinstance(source, Checkpoint):
        return Placement.choose(source, recipe, compute, progress)
    device = pick_device(compute.device)
    dtype = pick_dtype(compute.dtype, checkpoint.config.dtype or torch.float32, device)
    return Placement(device, dtype, compute.offload == "always", None)


def _measured_source(
    source: Checkpoint, place: Placement, context: EvaluationContext, progress: Progress, policy: Policy | None
) -> FidelityMeter:
    """What compares with the source on the report split; the source itself is dropped before the other is loaded."""
    with progress.task("load model", None, ""):
        base = LayerwiseModel(weights_of(source, place.device, place.dtype, place.streamed))
    meter = FidelityMeter(context, progress, policy)
    meter.measure_base(base, "report")
    return meter


def _measure_cache(
    result: Validation,
    network: LayerwiseModel,
    checkpoint: CompressedCheckpoint,
    report: CheckpointInfo,
    rows: Tensor,
    policy: Policy | None,
) -> None:
    """KV bytes per token that a forward pass in the checkpoint's dtype leaves in the cache, against the plan."""
    if network.source.streamed:
        result.skip("KV bytes per token", "measured only with all weights in memory (--offload never)")
        return
    model = network.model.to(checkpoint.config.dtype or torch.float32)
    with torch.inference_mode(), cache_policy(model, policy):
        cache = model(rows.to(model.device), use_cache=True).past_key_values
    planned: float = report["kv_bytes_per_token"]["after"]
    if policy is None:
        measured = cache_bytes_per_token(cache)
    else:
        measured = stored_bytes(cache) / rows.numel()
        planned = packed_bytes_per_token(policy, checkpoint.layouts, model.dtype, rows.shape[1])
        result.summary["cache"] = {"policy": policy.as_dict(), "tokens": rows.shape[1], "kv_bytes_per_token": planned}
    result.summary["measured_kv_bytes_per_token"] = measured
    result.summary["measured_compression"] = round(1 - measured / report["kv_bytes_per_token"]["before"], 6)
    # Budgets by the prompt are rounded, and a layer holds no more tokens than there were.
    loose = policy is not None and policy.needs_states
    fits = measured <= 1.02 * planned if loose else measured == planned
    result.add("KV bytes per token", fits, f"measured {measured:g}, planned {planned:g}")


def _check_stored_bases(result: Validation, checkpoint: CompressedCheckpoint) -> None:
    """Where a layer stores both bases: key_basis^T query_basis = I in each group, within the rounding of its dtype.

    For an orthonormal pair that is the orthonormality of its columns. Deviations are relative to the columns' norms. Of
    a channel of several nibbles the query basis has several columns, of which the last is the channel's.
    """
    family, shape = FAMILIES[checkpoint.config.model_type], checkpoint.shape
    worst, allowed, groups = 0.0, 0.0, 0
    for index, layout in enumerate(checkpoint.layouts):
        # Joint latents have a part of the identity here, the rest in values.
        if layout.folds_keys(shape) or layout.joint or not shape.rotary_dim:
            continue
        prefix = family.stored_prefix(index, checkpoint.names)
        key_basis, query_basis = (checkpoint.tensor(prefix + name) for name in ("key_basis", "query_basis"))
        allowed = 4 * torch.finfo(key_basis.dtype).eps
        sizes = [group.key.rank for group in layout.groups], [group.key.width for group in layout.groups]
        parts = zip(
            layout.groups, key_basis.double().split(sizes[0], 1), query_basis.double().split(sizes[1], 1), strict=True
        )
        for group, key, wide in parts:
            query = wide if isinstance(group.key, Numbers) else wide[:, _lowest(group.key)]
            scale = key.norm(dim=0)[:, None] * query.norm(dim=0)[None, :]
            identity = torch.eye(group.key.rank, dtype=torch.float64)
            worst = max(worst, float(((key.T @ query - identity) / scale).abs().max()))
            groups += 1
    if groups:
        result.add("stored bases", worst <= allowed, f"{groups} groups, deviation {worst:.1e}, allowed {allowed:.1e}")
    else:
        result.skip("stored bases", "key bases are folded into projections, or of keys and values together")


def _lowest(channels: Channels) -> list[int]:
    """The place of each channel's lowest nibble."""
    return [place for place, nibble in enumerate(channels.nibbles) if nibble is not None and nibble[1] == 0]


def _check_bases(result: Validation, run: Run) -> None:
    """encode decode^T = I at full rank, in float64 (for an orthonormal pair: its columns are orthonormal)."""
    worst, where = 0.0, ""
    for index, key, candidate in ((i, key, c) for i, layer in enumerate(run.bases()) for key, c in layer.items()):
        for side, pair in candidate.latents.items():
            identity = torch.eye(pair.encode.shape[-2], dtype=torch.float64)
            deviation = float((pair.encode @ pair.decode.mT - identity).abs().max())
            if deviation >= worst:
                worst, where = deviation, f"layer {index} {key} {side}"
    result.add(
        "bases at full rank", worst <= IDENTITY_TOLERANCE, f"largest deviation from the identity {worst:.1e} ({where})"
    )


def _check_full_rank(result: Validation, source: Checkpoint, run: Run, rows: Tensor, streamed: bool) -> None:
    """A rewrite that keeps all columns must not change float32 logits."""
    bases = run.bases()
    cpu = torch.device("cpu")
    network = CompressibleModel(source, cpu, torch.float32, rewrite_dtype=torch.float32, streamed=streamed)
    expected = batch_logits(network, rows)
    error = 0.0
    for key in bases[0]:
        chosen = bases.select([key] * len(bases))
        network.compress(chosen, [[full_ranks(b)] * len(b.qk.encode) for b in chosen])
        got = batch_logits(network, rows)
        error = max(error, float((got - expected).norm() / expected.norm()))
    result.add("full-rank rewrite", error <= FULL_RANK_TOLERANCE, f"relative error of float32 logits {error:.1e}")


def _check_accuracy(
    result: Validation, meter: FidelityMeter, compressed: LayerwiseModel, report: CheckpointInfo
) -> None:
    """The compressed model against the source over the report split: every ratio, KL, agreement, logit error."""
    outputs = meter.outputs(compressed, "report")
    found, rows = meter.compare(outputs, "report"), meter.text("report")
    error = logit_errors(compressed, rows, meter.reference("report"), outputs.states).numpy()
    target, base = report["accuracy"]["target"], meter.base["report"]
    result.summary["accuracy"] = {
        "metric": meter.metric,
        "value": found.accuracy,
        "interval_95": None if found.interval is None else list(found.interval),
        "target": target,
        **found.values,
        **{f"base_{name}": base[name] for name in base if name in METRICS},
        "left_out": meter.left_out["report"],
        "logit_error": {
            "mean": round(float(error.mean()), 6),
            "p99": round(float(np.quantile(error, 0.99)), 6),
            "max": round(float(error.max()), 6),
        },
        "tokens": rows.shape[0] * (rows.shape[1] - 1),
    }
    finite = math.isfinite(float(error.max()))
    result.add(
        "logits against source", finite, f"relative error per position: mean {error.mean():.4f}, max {error.max():.4f}"
    )
    met, text = judge_target(meter.metric, found, target)
    text = f"on the report split {text}"
    if base.get("at_chance"):
        result.summary["accuracy"]["at_chance"] = True
        text += "; the source is at chance on this text, where ratios to it mean nothing"
    if met is None:
        result.skip("accuracy target", text)
    else:
        result.add("accuracy target", met, text)


def judge_target(metric: str, found: Fidelity, target: float | None) -> tuple[bool | None, str]:
    """Whether a target is met on the report split (see Fidelity.against), and why; None where none was set."""
    bounds = "" if found.interval is None else " [{:.4f}, {:.4f}]".format(*found.interval)
    text = f"{metric} {found.accuracy:.4f}{bounds}"
    if target is None:
        return None, f"none was set; {text}"
    met, why = found.against(target)
    return met, f"{text}, target {target}{why and ': '}{why}"
