"""The front of a study: bytes of cache against predicted decode time at a fixed accuracy."""

from __future__ import annotations

from typing import Any

from .cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from .devices import find_device
from .errors import AccuracyError
from .layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from .progress import Progress
from .ranks import Sensitivity
from .recipe import Recipe, override
from .rewrite import layer_layout
from .run import Run
from .search import Measurer, RankTable, choose, complete_table
from .study_measure import SPLITS, Bench
from .study_store import StudyStore

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the objective: 0 is memory alone, 1 is latency alone."""

CHANGES = ["groups.size=any", "groups.domain=any"]
"""What a recipe needs so that the ranks choose domain and group size of every layer."""


def measure_front(
    bench: Bench, store: StudyStore, progress: Progress, name: str, recipe: Recipe, run: Run, targets: tuple[float, ...]
) -> None:
    """A record for each weight between memory and latency: the point that would be chosen at each target accuracy.

    Args:
        recipe: with CHANGES.
        run: its calibration.
    """
    probed: list[Sensitivity] = []  # the same for every weight
    for weight in WEIGHTS:
        key = f"front/{name}/w{weight:.2f}"
        if store.get(key):
            continue
        weighted = override(recipe, [f"objective.kind={weight}"])
        table = RankTable.open(run, weighted)
        table.probed = table.probed or probed
        measurer = Measurer(table, bench.network, run.bases(), bench.data, progress)
        path = measurer.path()
        probed = table.probed
        complete_table(measurer, path)
        objective = weighted.objective
        record = {
            "weight": weight,
            "device": objective.device,
            "context_tokens": objective.context_tokens,
            "batch_size": objective.batch_size,
        }
        found = {f"{target:.2f}": _chosen(table, target, measurer) for target in targets}
        store.put(key, {**record, "targets": found})


def _chosen(table: RankTable, target: float, measurer: Measurer) -> dict[str, Any]:
    """Bytes and predicted time of the point that `rotor export --accuracy` would choose."""
    try:
        point = choose(table, target)
    except AccuracyError as error:
        return {"out_of_reach": error.message}
    run, network, settings = table.run, measurer.network, table.recipe.objective
    element_bytes = int(run.info["element_bytes"])
    ranks = [[(qk, v) for qk, v in layer] for layer in point["ranks"]["stored"]]
    chosen = measurer.bases.select(point["choice"])
    layouts = [layer_layout(b, r, network.family.has_key_norm)[0] for b, r in zip(chosen, ranks, strict=True)]
    device = find_device(settings.device, settings.device_file)
    step = DecodeStep(settings.context_tokens, settings.batch_size, element_bytes)
    stored = kv_bytes_per_token(layouts, element_bytes)
    seconds = decode_seconds(layouts, run.shape, device, step)
    return {
        **point["compression"],
        **{split: table.accuracy(point, split) for split in SPLITS},
        "interval": point["report"].get("interval"),
        "kv_bytes_per_token": stored,
        "bytes_share": round(stored / uncompressed_kv_bytes_per_token(run.shape, element_bytes), 6),
        "predicted_seconds": seconds,
        "time_share": round(seconds / uncompressed_decode_seconds(run.shape, device, step), 6),
        "choice": point["choice"],
        "ranks": point["ranks"]["stored"],
    }
