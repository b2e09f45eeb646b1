"""From a run folder to a compressed checkpoint: choose ranks, rewrite shard by shard, describe what was done."""

from __future__ import annotations

import logging
import os.path
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bases import LayerBases
from .checkpoint import INDEX_FILE, Checkpoint, file_sha256, staged_folder, tensor_sha256, write_json, write_shard
from .compress import bias_names
from .export_job import ExportJob
from .families import read_attention
from .integration import ATTENTION, FORMAT_VERSION, METHOD
from .kernel_config import KERNEL_CONFIG
from .kernels.defaults import default_config
from .layout import LayerLayout, kv_bytes_per_token, uncompressed_kv_bytes_per_token
from .locks import exclusive
from .logs import log_file
from .model_card import model_card
from .progress import Progress, StageTimes
from .rank_search import RankSearch, rank_profiles, stored_ranks
from .ranks import LayerRanks
from .recipe import Recipe
from .report import write_with_checkpoint
from .run import Run
from .search import RankTable
from .settings import Compute, ExportSettings, Goal
from .shards import ShardContents, planned_layouts

log = logging.getLogger("rotor")

ROTOR_JSON, RECIPE, CARD = "rotor.json", "recipe.yaml", "README.md"


@dataclass(frozen=True)
class ExportResult:
    """What was written: the folder, the content of its rotor.json, and seconds per stage (0 measured points: none)."""

    folder: Path
    report: dict[str, Any]
    seconds: dict[str, float]
    measured_points: int


def export(
    run: str | Path,
    out: str | Path,
    *,
    accuracy: float | None = None,
    compression: float | None = None,
    removal_rate: float | None = None,
    overrides: Iterable[str] = (),
    objective: str | float | None = None,
    elastic: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    offload: str = "auto",
    device_map: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Write the compressed checkpoint of a run at exactly one of accuracy, compression or removal rate.

    Args:
        run: folder that calibrate wrote; its rank_table.json gains the points that are measured.
        out: the checkpoint folder; it appears whole or not at all.
        accuracy: least accuracy on the search split and on the report split (see Evaluation), in (0, 1].
        compression: least share of the KV cache to remove, in (0, 1).
        removal_rate: singular-value removal rate, in [0, 1).
        overrides: `section.field=value` for the recipe's ranks, evaluation, search and objective.
        elastic: keep all columns, and store the ranks at each of the recipe's search targets as profiles, chosen at
            load (`from_pretrained(out, rank_profile=0.95)`); the goal is the default one. Needs `accuracy`.
        device, dtype, offload, device_map: where the model runs when something is measured; see calibrate.
        objective: what is saved: `memory`, `latency`, or a weight from 0 (memory) to 1; None takes the recipe's.
    Raises:
        AccuracyError: the accuracy is out of reach. RotorError: see rotor.errors. Nothing is written then.
    """
    settings = ExportSettings(
        run,
        out,
        Goal(accuracy, compression, removal_rate),
        tuple(overrides),
        objective,
        elastic,
        Compute(device, dtype, offload, device_map),
        overwrite,
    )
    return run_export(settings, progress)


def run_export(settings: ExportSettings, progress: Progress | None = None) -> ExportResult:
    """What `export` does, with its arguments in one object; raises likewise."""
    job = ExportJob.check(settings)
    with exclusive(job.run.folder, "export"), exclusive(job.out, "export"), log_file(job.run.folder, "export"):
        job = ExportJob.check(settings)  # again: who held the folders until now may have written to them
        return _export(job, RankSearch(job, StageTimes(), progress or Progress()))


def _export(job: ExportJob, search: RankSearch) -> ExportResult:
    point = search.point()
    table, times = search.table, search.times
    ranks: list[LayerRanks] = [[(qk, v) for qk, v in layer] for layer in point["ranks"]["stored"]]
    with times.stage("write"), staged_folder(job.out, job.settings.overwrite, job.sources, job.needed_bytes) as staging:
        profiles = rank_profiles(table, point, job.goal.accuracy, job.recipe) if job.settings.elastic else {}
        chosen = search.bases.select(point["choice"])
        report = _write(staging, job, chosen, ranks, point, table, profiles, search.progress)
    log.info("compression %.4f, ranks of %s", point["compression"]["stored"], job.recipe.ranks.method)
    return ExportResult(job.out, report, times.seconds, search.measured_points)


def _write(
    staging: Path,
    job: ExportJob,
    bases: Sequence[LayerBases],
    ranks: list[LayerRanks],
    point: dict[str, Any],
    table: RankTable,
    profiles: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """Write every file of the checkpoint folder into `staging`; returns the content of rotor.json."""
    run, recipe, checkpoint, family, accuracy = job.run, job.recipe, job.checkpoint, job.family, job.goal.accuracy
    layouts = [layout for layout, _ in planned_layouts(bases, ranks, family.has_key_norm)]
    planned = planned_layouts(bases, stored_ranks(bases, ranks, bool(profiles)), family.has_key_norm)
    stored = [layout for layout, _ in planned]
    contents = ShardContents(checkpoint, family, run.shape, bases, planned, checkpoint.tensor)
    tensors = write_shards(staging, job, contents, progress)
    for file in run.info["model"].get("files", {}):
        job.check_unchanged(file)
    for path in checkpoint.sidecars():
        shutil.copyfile(path, staging / path.name)

    config = dict(checkpoint.config_dict)
    first = read_attention(family, 0, checkpoint.names, checkpoint.tensor, run.shape)
    config["attn_implementation"] = ATTENTION
    config["quantization_config"] = {
        "quant_method": METHOD,
        "format_version": FORMAT_VERSION,
        "biases": sorted(bias_names(first)),
        "layers": {str(i): layout.to_dict() for i, layout in enumerate(stored)},
    }
    if profiles:
        config["quantization_config"]["profiles"] = profiles
        config["rank_profile"] = str(accuracy)
    write_json(staging / "config.json", config)
    write_json(staging / KERNEL_CONFIG, default_config(layouts, run.shape).to_dict())
    (staging / RECIPE).write_text(recipe.to_yaml(), "utf-8")
    report = _report(run, recipe, checkpoint, layouts, point, table, accuracy, tensors, first.v_weight.element_size())
    if profiles:
        report["elastic"] = {"profiles": profiles, "stored_layouts": [layout.to_dict() for layout in stored]}
    report["files"] = {file: file_sha256(staging / file) for file in checkpoint.files}
    report["run"] = _relative(run.folder, job.out)
    report["source"]["path"] = _relative(checkpoint.folder, job.out)
    write_json(staging / ROTOR_JSON, report)
    (staging / CARD).write_text(model_card(report, recipe), "utf-8")
    with progress.task("report", None, ""):
        write_with_checkpoint(staging, run, job.out.name)
    return report


def write_shards(
    staging: Path, job: ExportJob, contents: ShardContents, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Write the checkpoint shard by shard.

    Tensors that stay as they are pass from the source's memory map to the file: only a shard's rewritten ones take
    memory. Hashes are computed while the shard is written: those of the new tensors, and that of the source's shard.

    Returns:
        For each tensor written its file, shape, dtype and SHA-256.
    Raises:
        CheckpointError: a shard is not the one that was calibrated.
    """
    checkpoint = job.checkpoint
    written: dict[str, dict[str, Any]] = {}
    with progress.task("write", checkpoint.total_bytes(), "B") as advance, ThreadPoolExecutor() as pool:
        for file in checkpoint.files:
            unchanged = pool.submit(job.check_unchanged, file)
            tensors = contents.tensors(file)
            digests = {name: pool.submit(tensor_sha256, tensor) for name, tensor in sorted(tensors.items())}
            write_shard(staging / file, tensors)
            for name, digest in digests.items():
                written[name] = {
                    "file": file,
                    "shape": list(tensors[name].shape),
                    "dtype": str(tensors[name].dtype).removeprefix("torch."),
                    "sha256": digest.result(),
                }
            unchanged.result()
            advance((checkpoint.folder / file).stat().st_size)
    if (checkpoint.folder / INDEX_FILE).is_file():
        total = sum((staging / file).stat().st_size for file in checkpoint.files)
        weight_map = {name: entry["file"] for name, entry in sorted(written.items())}
        write_json(staging / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return written


def _report(
    run: Run,
    recipe: Recipe,
    checkpoint: Checkpoint,
    layouts: list[LayerLayout],
    point: dict[str, Any],
    table: RankTable,
    accuracy: float | None,
    tensors: dict[str, dict[str, Any]],
    element_bytes: int,
) -> dict[str, Any]:
    """The content of rotor.json."""
    base, source = table.base or {}, run.info["model"]
    return {
        "format_version": FORMAT_VERSION,
        "versions": run.info["versions"],
        "recipe": recipe.name,
        "source": {key: source[key] for key in ("name", "hub_id", "revision", "shards", "files") if key in source},
        "compression": point["compression"],
        "rank_method": recipe.ranks.method,
        "parameter": point["parameter"],
        "kv_bytes_per_token": {
            "before": uncompressed_kv_bytes_per_token(run.shape, element_bytes),
            "after": kv_bytes_per_token(layouts, element_bytes),
            "element_bytes": element_bytes,
        },
        "accuracy": {
            "target": accuracy,
            "metric": recipe.evaluation.metric,
            "search": table.accuracy(point, "search"),
            "report": table.accuracy(point, "report"),
            "interval_95": point["report"]["interval"],
            "measurements": {split: point[split] for split in ("search", "report")},
            "base": {split: base.get(split) for split in ("search", "report")},
            "data": base.get("data"),
            "data_sha256": base.get("data_sha256"),
        },
        "ranks": point["ranks"],
        "layouts": [layout.to_dict() for layout in layouts],
        "removed_tensors": sorted(checkpoint.names - set(tensors)),
        "tensors": dict(sorted(tensors.items())),
    }


def _relative(path: Path, out: Path) -> str:
    """A path as seen from inside `out`, so that the folders can be moved together."""
    return os.path.relpath(path.resolve(), out.resolve())
