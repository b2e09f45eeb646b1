"""From a run folder to a compressed checkpoint: choose ranks, rewrite shard by shard, describe what was done."""

from __future__ import annotations

import os.path
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .bases import LayerBases
from .checkpoint import (
    INDEX_FILE,
    Checkpoint,
    check_space,
    check_writable,
    file_sha256,
    staged_folder,
    tensor_sha256,
    write_json,
    write_shard,
)
from .compress import bias_names
from .errors import AccuracyError, CheckpointError, UsageError
from .evaluation import evaluation_data
from .families import Family, find_family, read_attention
from .integration import FORMAT_VERSION, METHOD
from .kernel_config import kernel_config
from .layout import LayerLayout, kv_bytes_per_token, uncompressed_kv_bytes_per_token
from .model_card import model_card
from .placement import Placement
from .probe import columns
from .progress import Progress, StageTimes
from .ranks import LayerRanks
from .recipe import EXPORT_SECTIONS, Recipe, override
from .report import write_with_checkpoint
from .rewrite import layer_layout, rewrite_layer
from .run import LOG, Run
from .search import Measurer, RankTable, choose, complete_table, plan_for, rank_path

ROTOR_JSON, KERNEL_CONFIG, RECIPE, CARD = "rotor.json", "kernel_config.json", "recipe.yaml", "README.md"


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
    progress = progress or Progress()
    times = StageTimes()
    _check_goal(accuracy, compression, removal_rate)
    opened = Run.open(run)
    goal = [] if objective is None else [f"objective.kind={objective}"]
    recipe = override(opened.recipe, [*overrides, *goal], EXPORT_SECTIONS)
    if recipe.objective.kind != "memory" and recipe.ranks.method != "global":
        raise UsageError(
            f"objective {recipe.objective.kind}: only ranks.method global weighs anything but bytes, this run's is "
            f"{recipe.ranks.method}.",
            "Give --set ranks.method=global, or leave the objective at memory.",
        )
    if elastic and accuracy is None:
        raise UsageError("--elastic stores ranks by accuracy.", "Give --accuracy, the profile that is used by default.")
    if elastic and recipe.bases.refit:
        raise UsageError(
            "--elastic needs nested columns, and this run refits W_o for each rank.",
            "Calibrate again with --set bases.refit=false.",
        )
    out = Path(out)
    sources = [opened.model_folder, opened.folder]
    check_writable(out, overwrite, sources)
    checkpoint = Checkpoint(opened.model_folder)
    needed = int(checkpoint.total_bytes() * 1.1) + (1 << 20)
    check_space(out, needed)
    bases = opened.bases()

    table = RankTable.open(opened, recipe)
    known = len(table.points)
    measurer: Measurer | None = None

    def measuring() -> Measurer:
        """Loads the model the first time that something has to be measured."""
        nonlocal measurer
        if measurer is None:
            with times.stage("load model"):
                for file in checkpoint.files:
                    _check_unchanged(opened, checkpoint, file)
                place = Placement.choose(checkpoint, recipe, device, dtype, offload, device_map, progress)
                data = evaluation_data(recipe.evaluation, checkpoint.config, checkpoint.tokenizer)
                network = place.model(checkpoint, opened.folder)
            measurer = Measurer(table, network, bases, data, progress)
        return measurer

    if recipe.ranks.method == "global" and table.sensitivities is None:
        probing = measuring()
        with times.stage("probe"):
            probing.probe()
    path = rank_path(bases, opened, recipe, table.sensitivities)
    if accuracy is None:
        plan = plan_for(path, removal_rate, compression)
        point = table.find(plan)
        if point is None:
            point_measurer = measuring()
            with times.stage("measure"):
                point = point_measurer.measure(plan)
    else:
        if not table.complete:
            table_measurer = measuring()
            with times.stage("measure"):
                complete_table(table_measurer, path)
        point = choose(table, accuracy)
    measurer = None
    ranks: list[LayerRanks] = [[(qk, v) for qk, v in layer] for layer in point["ranks"]["stored"]]
    chosen = bases.select(point["choice"])

    with times.stage("write"), staged_folder(out, overwrite, sources, needed) as staging:
        profiles = _profiles(table, point, accuracy, recipe) if elastic and accuracy is not None else {}
        report = _write(
            staging, opened, recipe, checkpoint, chosen, ranks, point, table, accuracy, profiles, out, progress
        )
    _append_log(opened, f"export {out.name}: compression {point['compression']['stored']:.4f}, {times.seconds}")
    return ExportResult(out, report, times.seconds, len(table.points) - known)


def _check_goal(accuracy: float | None, compression: float | None, removal_rate: float | None) -> None:
    given = [name for name, value in _goals(accuracy, compression, removal_rate).items() if value is not None]
    if len(given) != 1:
        raise UsageError(
            f"got {' and '.join(given) or 'no goal'}, expected one of --accuracy, --compression, --removal-rate.",
            "Example: --accuracy 0.99",
        )
    if accuracy is not None and not 0 < accuracy <= 1:
        raise UsageError(f"--accuracy {accuracy}: expected a share above 0 and at most 1.", "Example: --accuracy 0.99")
    if compression is not None and not 0 < compression < 1:
        raise UsageError(
            f"--compression {compression}: expected a share between 0 and 1.", "Example: --compression 0.5"
        )
    if removal_rate is not None and not 0 <= removal_rate < 1:
        raise UsageError(f"--removal-rate {removal_rate}: expected at least 0, below 1.", "Example: --removal-rate 0.1")


def _goals(accuracy: float | None, compression: float | None, removal_rate: float | None) -> dict[str, float | None]:
    return {"--accuracy": accuracy, "--compression": compression, "--removal-rate": removal_rate}


def _check_unchanged(run: Run, checkpoint: Checkpoint, file: str) -> None:
    """Raises CheckpointError if a shard of the run's model is not the one that was calibrated."""
    if run.info["model"]["shards"].get(file) != file_sha256(checkpoint.folder / file):
        raise CheckpointError(
            f"{checkpoint.folder / file}: changed since calibration.", "Calibrate again, or restore the file."
        )


def _write(
    staging: Path,
    run: Run,
    recipe: Recipe,
    checkpoint: Checkpoint,
    bases: Sequence[LayerBases],
    ranks: list[LayerRanks],
    point: dict[str, Any],
    table: RankTable,
    accuracy: float | None,
    profiles: dict[str, Any],
    out: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Write every file of the checkpoint folder into `staging`; returns the content of rotor.json."""
    family, shape = find_family(checkpoint.config), run.shape
    planned = [
        layer_layout(layer, layer_ranks, family.has_key_norm) for layer, layer_ranks in zip(bases, ranks, strict=True)
    ]
    layouts = [layout for layout, _ in planned]
    stored = layouts
    if profiles:
        full = [[columns(layer)] * len(layer.qk.encode) for layer in bases]
        planned = [layer_layout(b, r, family.has_key_norm) for b, r in zip(bases, full, strict=True)]
        stored = [layout for layout, _ in planned]
    tensors = write_shards(staging, checkpoint, family, run, bases, planned, progress)
    for path in checkpoint.sidecars():
        shutil.copyfile(path, staging / path.name)

    config = dict(checkpoint.config_dict)
    first = read_attention(family, 0, checkpoint.names, checkpoint.tensor, shape)
    config["attn_implementation"] = METHOD  # a stock transformers without rotor refuses to load it
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
    write_json(staging / KERNEL_CONFIG, kernel_config(layouts, shape))
    (staging / RECIPE).write_text(recipe.to_yaml(), "utf-8")
    report = _report(run, recipe, checkpoint, layouts, point, table, accuracy, tensors, first.v_weight.element_size())
    if profiles:
        report["elastic"] = {"profiles": profiles, "stored_layouts": [layout.to_dict() for layout in stored]}
    report["files"] = {file: file_sha256(staging / file) for file in checkpoint.files}
    report["run"] = _relative(run.folder, out)
    report["source"]["path"] = _relative(checkpoint.folder, out)
    write_json(staging / ROTOR_JSON, report)
    (staging / CARD).write_text(model_card(report, recipe), "utf-8")
    write_with_checkpoint(staging, run, out.name)
    return report


def _profiles(table: RankTable, point: dict[str, Any], accuracy: float, recipe: Recipe) -> dict[str, Any]:
    """Accuracy -> ranks of every layer and group, for the goal and each search target that can be had.

    A profile may only change ranks: targets at which the table chooses another domain or group size are left out.
    """
    profiles = {}
    for target in sorted({accuracy, *recipe.search.targets}, reverse=True):
        try:
            found = choose(table, target)
        except AccuracyError:
            continue
        if found["choice"] == point["choice"]:
            profiles[str(target)] = found["ranks"]["stored"]
    return profiles


def write_shards(
    staging: Path,
    checkpoint: Checkpoint,
    family: Family,
    run: Run,
    bases: Sequence[LayerBases],
    planned: list[tuple[LayerLayout, tuple[int, ...]]],
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """Rewrite the checkpoint shard by shard, without building the model.

    Tensors that stay as they are pass from the source's memory map to the file: only a shard's rewritten ones take
    memory. The new tensors of a layer's attention go where its value projection (or fused projection) was. Hashes are
    computed while the shard is written: those of the new tensors, and that of the source's shard.

    Returns:
        For each tensor written its file, shape, dtype and SHA-256.
    Raises:
        CheckpointError: a shard is not the one that was calibrated.
    """
    shape = run.shape
    consumed: set[str] = set()
    layers_in: dict[str, list[int]] = {}
    for layer in range(shape.num_layers):
        prefix = family.stored_prefix(layer, checkpoint.names)
        present = [prefix + name for name in family.consumed if prefix + name in checkpoint.names]
        consumed.update(present)
        home = next((n for n in present if n.endswith(family.value_weight)), None)
        if home is not None:
            layers_in.setdefault(checkpoint.file_of[home], []).append(layer)

    written: dict[str, dict[str, Any]] = {}
    with progress.task("write", checkpoint.total_bytes(), "B") as advance, ThreadPoolExecutor() as pool:
        for file in checkpoint.files:
            unchanged = pool.submit(_check_unchanged, run, checkpoint, file)
            tensors: dict[str, Tensor] = {
                name: checkpoint.tensor(name) for name in checkpoint.names_in(file) if name not in consumed
            }
            for layer in layers_in.get(file, []):
                weights = read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)
                layout, order = planned[layer]
                for name, tensor in rewrite_layer(weights, bases[layer], layout, order, shape).items():
                    tensors[family.stored_prefix(layer, checkpoint.names) + name] = tensor
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
    base = table.base or {}
    return {
        "format_version": FORMAT_VERSION,
        "versions": run.info["versions"],
        "recipe": recipe.name,
        "source": {key: run.info["model"].get(key) for key in ("name", "hub_id", "revision", "shards")},
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


def _append_log(run: Run, line: str) -> None:
    with (run.folder / LOG).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
