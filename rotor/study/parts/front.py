"""`front`: bytes of cache against predicted decode time at a fixed accuracy, as the objective weighs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...allocation.registry import CHOOSING
from ...errors import UsageError
from ...format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ...prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from ...prediction.devices import find_device
from ...recipe import Recipe, override
from ...rewriting.shards import planned_layouts
from ...search.measurer import Measurer
from ...search.point import Point, as_lists
from ...search.search import most_points
from ..context import TARGETS, StudyContext
from ..part import Part, Task
from ..plots import draw_legend, draw_line
from ..records import point_record
from ..request import StudyPlan
from ..store import StudyStore
from ..tables import Table

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the objective: 0 is memory alone, 1 is latency alone."""

CHANGES = ["groups.size=any", "groups.domain=any"]
"""What a recipe needs so that the ranks choose form of keys and group size of every layer."""


class Front(Part):
    """Of the recipes in focus whose ranks choose form of keys and group size."""

    name = "front"

    def check(self, plan: StudyPlan) -> None:
        if not _choosing(plan):
            raise UsageError(
                f"--parts front: the ranks of {', '.join(plan.focus)} do not choose form of keys and group size.",
                f"Give --focus a recipe with ranks.method={CHOOSING}, as rotor-16 has.",
            )

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in _choosing(study.plan).items():
            free, needs = override(recipe, CHANGES), {f"front/{name}": override(recipe, CHANGES)}
            most = len(TARGETS) * most_points(recipe.search.resolution)
            for weight in WEIGHTS:
                measure = partial(_measure, study, name, free, weight)
                yield Task(f"{self.name}/{name}/w{weight:.2f}", measure, needs, most)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows, records = list[list[str]](), store.part(self.name)
        for key, record in records.items():
            for target, point in record["targets"].items():
                start = [f"`{key.split('/')[0]}`", f"{float(target):g}", f"{record['weight']:g}"]
                if "out_of_reach" in point:
                    rows.append([*start, "out of reach", "", "", ""])
                    continue
                layers = " ".join(dict.fromkeys(f"{point['choice'].count(c)} {c}" for c in point["choice"]))
                cells = [str(point["kv_bytes_per_token"]), f"{point['bytes_share']:.3f}", f"{point['time_share']:.3f}"]
                rows.append([*start, *cells, layers])
        if records:
            first = next(iter(records.values()))
            yield Table(
                ["recipe", "accuracy", "weight of latency", "bytes per token", "bytes, share", "time, share", "layers"],
                sorted(rows, key=lambda row: (row[0], -float(row[1]), float(row[2]))),
                "Bytes of cache against predicted decode time",
                f"Form of keys and group size of every layer chosen with the ranks. Time is that of attention in a "
                f"decode step as `rotor/prediction/cost.py` predicts it from the rates of {first['device']}, at "
                f"{first['context_tokens']} tokens of context and a batch of {first['batch_size']}, not a measurement; "
                "shares are of the uncompressed model.",
            )

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        return {self.name: partial(_draw, store.part(self.name))} if store.part(self.name) else {}


def _draw(records: dict[str, dict[str, Any]], figure: Any) -> None:
    """Predicted time against bytes, both as shares of the uncompressed model; one line for each target accuracy."""
    first = next(iter(records.values()))
    figure.suptitle(
        f"cache against predicted decode time on {first['device']}, {first['context_tokens']} tokens of context, "
        f"batch {first['batch_size']}"
    )
    series: dict[str, dict[tuple[float, float], list[str]]] = {}
    for key, record in sorted(records.items()):  # by weight
        for target, point in record["targets"].items():
            if "out_of_reach" not in point:
                places = series.setdefault(f"{key.split('/')[0]} at {float(target):g}", {})
                places.setdefault((point["bytes_share"], point["time_share"]), []).append(f"{record['weight']:g}")
    axes = figure.subplots()
    for index, (name, places) in enumerate(series.items()):
        draw_line(axes, index, list(places), name, linestyle=":")
        for place, weights in places.items():
            axes.annotate(", ".join(weights), place, textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set(xlabel="bytes of cache per token (share of the uncompressed model)")
    axes.set(ylabel="predicted attention time (share)")
    draw_legend(axes, title="numbers: weight of latency", title_fontsize=8)


def _choosing(plan: StudyPlan) -> dict[str, Recipe]:
    return {name: plan.recipes[name] for name in plan.focus if plan.recipes[name].ranks.rule.chooses}


def _measure(study: StudyContext, name: str, recipe: Recipe, weight: float) -> dict[str, Any]:
    measurer, _ = study.path(f"front/{name}", recipe)
    weighted = override(recipe, [f"objective.kind={weight}"])
    chosen = partial(_chosen, measurer, weighted)
    return {
        "weight": weight,
        "device": weighted.objective.device,
        "context_tokens": weighted.objective.context_tokens,
        "batch_size": weighted.objective.batch_size,
        "targets": study.at_targets(measurer, measurer.path_of(weighted), weighted, chosen),
    }


def _chosen(measurer: Measurer, recipe: Recipe, point: Point) -> dict[str, Any]:
    """Bytes and predicted time of a point."""
    run, settings = measurer.table.run, recipe.objective
    element_bytes = int(run.info["element_bytes"])
    chosen = measurer.bases.select(point.choice, point.channels)
    layouts = [layout for layout, _ in planned_layouts(chosen, point.ranks)]
    device = find_device(settings.device, settings.device_file)
    step = DecodeStep(settings.context_tokens, settings.batch_size, element_bytes)
    stored = kv_bytes_per_token(layouts, element_bytes)
    seconds = decode_seconds(layouts, run.shape, device, step)
    return {
        **point_record(point),
        "kv_bytes_per_token": stored,
        "bytes_share": round(stored / uncompressed_kv_bytes_per_token(run.shape, element_bytes), 6),
        "predicted_seconds": seconds,
        "time_share": round(seconds / uncompressed_decode_seconds(run.shape, device, step), 6),
        "choice": list(point.choice),
        "ranks": as_lists(point.ranks),
    }
