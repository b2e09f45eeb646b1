"""What a study records of a calibration and of a measured point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..bases.layer import LayerBases
from ..calibration.run import Run
from ..data.splits import SPLITS
from ..evaluation.fidelity import Fidelity
from ..recipe.metric_registry import METRICS
from ..search.point import Point

METRIC_LABELS = {
    "accuracy": "accuracy (ratio to the model)",
    **{name: info.label for name, info in METRICS.items() if not info.parts},
}
"""What is recorded of a point in each split; a point may lack some."""


def first_candidates(run: Run) -> list[LayerBases]:
    """The bases of each layer's first candidate: the only one, unless the recipe leaves the choice to the ranks.

    Without the moments that serve the refit, which are far larger.
    """
    return [replace(next(iter(layer.values())), outputs=None) for layer in run.bases()]


def stage_seconds(run: Run) -> dict[str, float]:
    """Seconds of the stages of a calibration that depend on its tokens and bases."""
    skip = ("check model", "load model", "write")
    return {name: stage["seconds"] for name, stage in run.info["stages"].items() if name not in skip}


def point_record(point: Point) -> dict[str, Any]:
    """Compression, accuracy and every ratio of a point on both splits, and the report split's intervals."""
    record: dict[str, Any] = point.compression_json
    for split in SPLITS:
        found = point.fidelity(split)
        values = {name: found.values[name] for name in METRIC_LABELS if name in found.values}
        record[split] = {"accuracy": found.accuracy, **values}
    return record | _intervals(point.fidelity("report"))


def target_record(point: Point) -> dict[str, Any]:
    """The point that a target led to: compression, accuracy on both splits, KL and intervals on the report split."""
    report = point.fidelity("report")
    values = {split: point.fidelity(split).accuracy for split in SPLITS}
    return {**point.compression_json, **values, "kl_div": report.values.get("kl_div"), **_intervals(report)}


def _intervals(report: Fidelity) -> dict[str, list[float] | None]:
    """95 % intervals of a measurement: of the accuracy, and of the KL in nats."""
    bounds = [report.values.get(f"kl_div_{end}") for end in ("low", "high")]
    known = [bound for bound in bounds if bound is not None]
    return {
        "interval": None if report.interval is None else list(report.interval),
        "kl_interval": known if len(known) == 2 else None,
    }
