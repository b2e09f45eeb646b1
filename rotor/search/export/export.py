"""Write a compressed checkpoint from a run: choose ranks, rewrite shard by shard, describe what was done."""

from __future__ import annotations

import logging
import os.path
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...checkpoint.bases import FoldedBases, LayerBases
from ...checkpoint.families import find_family, language_model_setting
from ...checkpoint.files import CARD, KERNEL_CONFIG, RECIPE, ROTOR_JSON, tensor_sha256, write_json, write_text
from ...checkpoint.folding import fold_bases, model_layouts
from ...checkpoint.layout import AttentionShape, LayerLayout
from ...checkpoint.locks import exclusive
from ...checkpoint.manifest import write_manifest
from ...checkpoint.projections import GetTensor, read_attention
from ...checkpoint.publishing import staged_folder, write_tensors
from ...checkpoint.rewritten import BASES, RewrittenTensors
from ...checkpoint.schemas import CheckpointInfo, ModelInfo, SourceInfo, TensorInfo, TextInfo
from ...checkpoint.section import FORMAT_VERSION, MARK
from ...checkpoint.sizes import CacheSize
from ...errors import CheckpointError, system_errors
from ...kernels.dispatch import default_config
from ...logs import log_file
from ...models.source import INDEX_FILE, Checkpoint, sidecars
from ...models.splits import SPLITS
from ...options import with_fields_of
from ...progress import Progress, StageTimes
from ...recipe.recipe import Recipe
from ...recipe.requests import ExportRequest
from ..evaluation.accuracy import Accuracy
from ..point import Point
from ..report.report import write_with_checkpoint
from .job import ExportJob
from .model_card import model_card, repeated_metadata
from .search import RankSearch
from .texts import texts_before_and_after

if TYPE_CHECKING:
    from ...policies import Policy

log = logging.getLogger("rotor")

ROUNDED = 1e-6
"""Points have six digits of a compression."""


@dataclass(frozen=True)
class ExportResult:
    """A written checkpoint: its folder, the content of its rotor.json, its accuracy, and seconds per stage.

    digest: SHA-256 of manifest.json, which has that of every other file.
    """

    folder: Path
    report: CheckpointInfo
    accuracy: Accuracy
    digest: str
    seconds: dict[str, float]
    measured_points: int


@system_errors()
def run_export(request: ExportRequest) -> ExportResult:
    """Write the compressed checkpoint of a run at exactly one of accuracy, compression or removal rate.

    Raises:
        AccuracyError: the accuracy is out of reach. RotorError: see rotor.errors. Nothing is written then.
    """
    with ExitStack() as held:
        held.enter_context(exclusive(Path(request.run)))
        job = ExportJob.check(request)
        held.enter_context(exclusive(job.out.path))
        job.out.check(request.overwrite, job.sources)  # who held it until now may have written to it
        held.enter_context(log_file(job.run.folder, "export"))
        return _export(RankSearch(job, StageTimes(), request.progress or Progress()))


export = with_fields_of(ExportRequest, run_export, "export")


def _export(search: RankSearch) -> ExportResult:
    job, point = search.job, search.point()
    policy = search.stored_policy(point)
    texts = texts_before_and_after(search, point) if job.request.writes_texts and not job.unmeasured else []
    search.close()
    accuracy = _accuracy(job, point, None if job.unmeasured else search)
    times = search.times
    with times.stage("write"), staged_folder(job.out, job.request.overwrite, job.sources, job.needed_bytes) as staging:
        chosen = job.run.bases(point.channels)
        report, digest = _write(staging, job, policy, chosen, point, accuracy, texts, search.progress)
    for warning in job.warnings:
        log.warning("%s", warning)
    if job.unmeasured:
        log.warning("accuracy is not measured: %s", job.unmeasured)
    log.debug("compression %.4f, %s", report["compression"]["stored"], allocated_by(job.recipe))
    return ExportResult(job.out.path, report, accuracy, digest, times.seconds, search.measured_points)


def _write(
    staging: Path,
    job: ExportJob,
    policy: Policy | None,
    bases: Sequence[LayerBases],
    point: Point,
    accuracy: Accuracy,
    texts: list[TextInfo],
    progress: Progress,
) -> tuple[CheckpointInfo, str]:
    """Write every file of the checkpoint folder into `staging`; returns the content of rotor.json, and the digest."""
    run = job.run
    recipe = job.recipe
    checkpoint = job.checkpoint
    family = job.family
    layouts = model_layouts(bases, point.ranks, recipe.exact.tokens)
    size = _size(job, layouts, policy, point)
    apart = job.request.without_weights
    contents = rewritten_tensors(checkpoint, run.shape, bases.__getitem__, layouts, checkpoint.tensor)
    tensors = write_shards(None if apart else staging, checkpoint, contents, job.check_unchanged, progress)
    if apart:
        folded = {
            f"{layer}.{n}": t for layer in range(len(layouts)) for n, t in contents.bases(layer).tensors().items()
        }
        write_tensors(staging / BASES, folded)
    for file in run.info["model"].get("files", {}):
        job.check_unchanged(file)
    for name in sidecars(checkpoint.folder):
        (staging / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(checkpoint.folder / name, staging / name)

    config = dict(checkpoint.config_dict)
    dtype = checkpoint.dtype
    config["attn_implementation"] = language_model_setting(checkpoint.config, MARK)
    config["quantization_config"] = {
        "quant_method": MARK,
        "format_version": FORMAT_VERSION,
        "biases": sorted(contents.biases),
        "layers": {str(i): layout.to_dict() for i, layout in enumerate(layouts)},
    }
    if policy is not None:
        config["quantization_config"]["cache"] = policy.as_dict()
    report = _report(job, layouts, size, point, accuracy, tensors)
    if texts:
        report["texts"] = texts
    if apart:
        source = report["source"]
        source_info: SourceInfo = {
            "name": source["name"],
            "path": source["path"],
            "hub_id": source["hub_id"],
            "revision": source["revision"],
            "shards": source["shards"],
            "sizes": {file: checkpoint.bytes_of(file) for file in source["shards"]},
        }
        config["quantization_config"]["source"] = source_info
        if not {"dtype", "torch_dtype"} & config.keys():  # the bases' own would be taken for the model's
            config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(staging / "config.json", config)
    write_json(staging / KERNEL_CONFIG, default_config(layouts).to_dict())
    write_text(staging / RECIPE, recipe.to_yaml())
    if policy is not None:
        from ...policies import LONG_TOKENS, packed_bytes_per_token

        report["cache"] = {
            "policy": policy.as_dict(),
            "kv_bytes_per_token": {
                str(tokens): packed_bytes_per_token(policy, layouts, dtype, tokens)
                for tokens in (recipe.evaluation.seq_len, LONG_TOKENS)
            },
        }
    write_json(staging / ROTOR_JSON, report)
    write_text(staging / CARD, model_card(report, accuracy, recipe, family, run.shape, apart))
    with progress.task("report", None, ""):
        write_with_checkpoint(staging, Path(job.request.out), report, recipe, run)
    return report, write_manifest(staging, "checkpoint")


def write_shards(
    staging: Path | None,
    checkpoint: Checkpoint,
    contents: RewrittenTensors,
    check: Callable[[str], object],
    progress: Progress,
) -> dict[str, TensorInfo]:
    """Write the compressed tensors shard by shard.

    Tensors that stay as they are pass from the source's memory map to the file: only a shard's rewritten ones take
    memory. Hashes are computed while the shard is written: those of the new tensors, and that of the source's shard.

    Args:
        staging: the folder; None computes what would be written.
        checkpoint: the source. check: raises CheckpointError where one of its shards has changed.
    Returns:
        For each tensor its file, shape, dtype and SHA-256.
    """
    written: dict[str, TensorInfo] = {}
    with progress.task("write", checkpoint.total_bytes(), "B") as advance, ThreadPoolExecutor() as pool:
        for file in checkpoint.files:
            unchanged = pool.submit(check, file)
            tensors = dict(contents.items(file))
            digests = {name: pool.submit(tensor_sha256, tensor) for name, tensor in sorted(tensors.items())}
            if staging is not None:
                write_tensors(staging / file, tensors)
            for name, digest in digests.items():
                written[name] = {
                    "file": file,
                    "shape": list(tensors[name].shape),
                    "dtype": str(tensors[name].dtype).removeprefix("torch."),
                    "sha256": digest.result(),
                }
            unchanged.result()
            advance((checkpoint.folder / file).stat().st_size)
    if staging is not None and (checkpoint.folder / INDEX_FILE).is_file():
        total = sum((staging / file).stat().st_size for file in checkpoint.files)
        weight_map = {name: entry["file"] for name, entry in sorted(written.items())}
        write_json(staging / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return written


def _report(
    job: ExportJob,
    layouts: list[LayerLayout],
    size: CacheSize,
    point: Point,
    accuracy: Accuracy,
    tensors: dict[str, TensorInfo],
) -> CheckpointInfo:
    """The content of rotor.json."""
    source, info = job.run.info["model"], job.run.info
    place = job.out.path.resolve()  # paths from inside it, so that the folders can be moved together
    kept = {key: source[key] for key in ("name", "hub_id", "revision", "shards", "files", "state_bytes")}
    kept |= {"path": os.path.relpath(job.checkpoint.folder.resolve(), place)}
    kept |= {"base_model": job.request.base_model} if job.request.base_model else {}
    kept |= {"card": card} if (card := repeated_metadata(job.checkpoint.folder)) else {}
    about = cast(ModelInfo, kept)
    return {
        "format_version": FORMAT_VERSION,
        "versions": info["versions"],
        "recipe": job.recipe.name,
        "run": os.path.relpath(job.run.folder.resolve(), place),
        "source": about,
        "compression": {"planned": point.planned, "stored": round(size.removed(job.context_tokens), 6)},
        "rank_method": allocated_by(job.recipe),
        "parameter": point.parameter,
        "kv_bytes_per_token": size.info,
        "kv_bytes_of_sequence": size.of_sequence(job.context_tokens),
        "accuracy": accuracy.to_dict(),
        "ranks": point.ranks_json,
        "layouts": [layout.to_dict() for layout in layouts],
        "removed_tensors": sorted(job.checkpoint.names - set(tensors)),
        "tensors": dict(sorted(tensors.items())),
    }


def _size(job: ExportJob, layouts: Sequence[LayerLayout], policy: Policy | None, point: Point) -> CacheSize:
    """The size of the cache that layouts describe, in the dtype that the model is served in.

    Args:
        policy: keeps the cache: then the size is of what it stores of a prompt of the served length.

    Raises:
        CheckpointError: it is not what the plan counted.
    """
    dtype = job.checkpoint.dtype
    size = CacheSize.of_layouts(layouts, job.run.shape, dtype.itemsize)
    removed = size.removed(job.context_tokens)
    if abs(removed - point.stored) > ROUNDED:
        raise CheckpointError(
            f"{job.run.folder}: its plan counts {point.stored:.6f} of the cache as removed, the rows that it leads to "
            f"remove {removed:.6f} of a cache in {str(dtype).removeprefix('torch.')}.",
            "Calibrate again: the run was written by another version of rotor.",
        )
    if policy is None:
        return size
    from ...policies import packed_size

    return packed_size(policy, layouts, job.run.shape, dtype, job.context_tokens)


def _accuracy(job: ExportJob, point: Point, search: RankSearch | None) -> Accuracy:
    """Measurements of the point that is written; where nothing was (no search), why."""
    metric = job.recipe.evaluation.metric
    target = job.request.accuracy
    if search is None:
        excluded = tuple(sorted(job.run.calibrated_documents))  # no text for `validate` to measure on
        return Accuracy(metric, target, excluded_documents=excluded, not_measured=job.unmeasured)
    table, context = search.table, search.table.context
    return Accuracy(
        metric,
        target,
        measured={split: point.fidelity(split) for split in SPLITS},
        base=table.base,
        left_out=table.left_out,
        data=context.data,
        data_sha256=context.data_sha256,
        excluded_documents=context.excluded,
        documents=search.data.documents,
        table=context.key,
    )


def allocated_by(recipe: Recipe) -> str:
    """The method that chose ranks, or the bits that were allocated."""
    return f"bits {list(recipe.codes.bits)}" if recipe.coded else recipe.ranks.method


def rewritten_tensors(
    checkpoint: Checkpoint,
    shape: AttentionShape,
    bases: Callable[[int], LayerBases],
    layouts: Sequence[LayerLayout],
    read: GetTensor,
) -> RewrittenTensors:
    """The tensors that a source becomes by a run's bases, of which one layer's are in memory at a time.

    Args:
        bases: gives those of a layer. layouts: from `model_layouts`.
        read: `checkpoint.tensor`, or for shapes and dtypes alone `checkpoint.meta_tensor`.
    """
    family = find_family(checkpoint.config)
    first = read_attention(family, 0, checkpoint.names, checkpoint.meta_tensor, shape)

    def folded(layer: int) -> FoldedBases:
        return fold_bases(bases(layer), layouts[layer], shape.layer(layer))

    return RewrittenTensors(family, shape, layouts, first.bias_names, checkpoint.file_of, read, folded)
