"""What a study records of a calibration and of a measured point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..bases.layer import LayerBases
from ..calibration.run import Run
from ..data.splits import SPLITS
from ..recipe.metric_registry import METRICS
from ..search.point import Point

METRIC_LABELS = {
    "accuracy": "accuracy (ratio to the model)",
    **{name: info.label for name, info in METRICS.items() if not info.parts},
}
"""What is recorded of a point in each split; a point may lack some."""


def bases_of(run: Run) -> list[LayerBases]:
    """The bases of each layer, without the moments that serve the refit, which are far larger."""
    return [replace(layer, outputs=None) for layer in run.bases()]


def stage_seconds(run: Run) -> dict[str, float]:
    """Seconds of the stages of a calibration that depend on its tokens and bases."""
    skip = ("check model", "load model", "write")
    return {name: stage["seconds"] for name, stage in run.info["stages"].items() if name not in skip}


def point_record(point: Point) -> dict[str, Any]:
    """Compression, accuracy and every ratio of a point on both splits; 95 % intervals of accuracy and KL on report."""
    record: dict[str, Any] = point.compression_json
    for split in SPLITS:
        found = point.fidelity(split)
        values = {name: found.values[name] for name in METRIC_LABELS if name in found.values}
        record[split] = {"accuracy": found.accuracy, **values}
    report = point.fidelity("report")
    bounds = [bound for end in ("low", "high") if (bound := report.values.get(f"kl_div_{end}")) is not None]
    return record | {"interval": report.interval, "kl_interval": bounds or None}
