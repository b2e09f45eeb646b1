"""The front of a study: bytes of cache against predicted decode time at a fixed accuracy."""

from __future__ import annotations

from typing import Any

from ..allocation.plan import RankPath
from ..calibration.run import Run
from ..errors import AccuracyError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from ..prediction.devices import find_device
from ..recipe import Recipe, override
from ..rewriting.shards import planned_layouts
from ..search.point import as_lists
from ..search.search import Measurer, search_target
from .measure import StudySubject, target_record
from .store import StudyStore

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the objective: 0 is memory alone, 1 is latency alone."""

CHANGES = ["groups.size=any", "groups.domain=any"]
"""What a recipe needs so that the ranks choose form of keys and group size of every layer."""


def measure_front(
    subject: StudySubject, store: StudyStore, name: str, recipe: Recipe, run: Run, targets: tuple[float, ...]
) -> None:
    """A record for each weight between memory and latency: the point that would be chosen at each target accuracy.

    Args:
        recipe: with CHANGES.
        run: its calibration.
    """
    measurer = subject.measurer(run, recipe)
    for weight in WEIGHTS:
        key = f"front/{name}/w{weight:.2f}"
        if store.get(key):
            continue
        weighted = override(recipe, [f"objective.kind={weight}"])
        path = measurer.path(weighted)
        objective = weighted.objective
        record = {
            "weight": weight,
            "device": objective.device,
            "context_tokens": objective.context_tokens,
            "batch_size": objective.batch_size,
        }
        found = {f"{target:.2f}": _chosen(measurer, path, weighted, target) for target in targets}
        store.put(key, {**record, "targets": found})


def _chosen(measurer: Measurer, path: RankPath, recipe: Recipe, target: float) -> dict[str, Any]:
    """Bytes and predicted time of the point that `rotor export --accuracy` would choose."""
    try:
        plan = search_target(measurer.table, path, recipe, target, measurer.search)
    except AccuracyError as error:
        return {"out_of_reach": error.message}
    point, run, settings = measurer.measure(plan), measurer.table.run, recipe.objective
    element_bytes = int(run.info["element_bytes"])
    chosen = measurer.bases.select(point.choice, point.channels)
    layouts = [layout for layout, _ in planned_layouts(chosen, point.ranks)]
    device = find_device(settings.device, settings.device_file)
    step = DecodeStep(settings.context_tokens, settings.batch_size, element_bytes)
    stored = kv_bytes_per_token(layouts, element_bytes)
    seconds = decode_seconds(layouts, run.shape, device, step)
    return {
        **target_record(point),
        "kv_bytes_per_token": stored,
        "bytes_share": round(stored / uncompressed_kv_bytes_per_token(run.shape, element_bytes), 6),
        "predicted_seconds": seconds,
        "time_share": round(seconds / uncompressed_decode_seconds(run.shape, device, step), 6),
        "choice": list(point.choice),
        "ranks": as_lists(point.ranks),
    }
