"""The part `curves`: points of each recipe over compression, and its strongest compression at each target accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ....errors import AccuracyError
from ....models.splits import SPLITS
from ....recipe.metric_registry import METRICS
from ....recipe.recipe import Recipe
from ....search.evaluation.accuracy import Fidelity
from ....search.plan_choice import find_plan
from ....search.point import Point
from ....search.report.figures import shown_loss
from ..context import TARGETS, StudyContext
from ..part import CsvRow, Part, Table, Task, number
from ..plots import KL_LABEL, LEAST_KL, accuracy_axis, draw_legend, draw_line
from ..store import Record, StudyStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPRESSIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

METRIC_LABELS = {
    "accuracy": "accuracy (ratio to the model)",
    **{name: info.label for name, info in METRICS.items() if not info.parts},
}
"""Values that are recorded of a point on each split, with their labels; a point may lack some."""

Records = dict[str, Record]
"""Records of one recipe, by what they are: targets, p0.10 ..."""


class Curves(Part):
    name = "curves"
    csv = "results.csv"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in study.inputs.recipes.items():
            yield from curve_tasks(study, name, recipe)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        by_recipe = curves(store.records)
        if by_recipe:
            yield Table((), (), "Recipes")
            yield from target_tables(by_recipe)
            yield _points_table(by_recipe)

    def rows(self, store: StudyStore) -> Iterator[CsvRow]:
        """One row for each recipe and compression, with the metrics of both splits."""
        for recipe, records in curves(store.records).items():
            for point in points(records):
                low, high = point["interval"]
                yield {
                    "part": self.name,
                    "recipe": recipe,
                    "compression_target": point["target"],
                    "compression_planned": point["planned"],
                    "compression_stored": point["stored"],
                    **{f"{split}_{name}": point[split].get(name, "") for split in SPLITS for name in METRIC_LABELS},
                    "report_interval_low": low,
                    "report_interval_high": high,
                }

    def plots(self, store: StudyStore) -> dict[str, Callable[[Figure], None]]:
        by_recipe = curves(store.records)
        return {"recipes": partial(_draw, by_recipe)} if any(map(points, by_recipe.values())) else {}


def curve_tasks(study: StudyContext, name: str, recipe: Recipe) -> Iterator[Task]:
    """The tasks of one recipe: its points and its targets."""

    def point(target: float) -> Record:
        evaluator, path = study.path(name, recipe)
        plan = path.at_compression(target)
        if plan is None:
            return {"target": target, "out_of_reach": round(path.plans()[-1].stored, 6)}
        return {**point_record(evaluator.measure(plan, SPLITS)), "target": target}

    def targets() -> Record:
        """The point that `rotor export --accuracy` would choose for each target, or why there is none."""
        (evaluator, path) = study.path(name, recipe)
        reached = Record()
        for target in TARGETS:
            try:
                plan = find_plan(path, recipe.search, target, evaluator.search)
            except AccuracyError as error:
                reached[f"{target:.2f}"] = {"out_of_reach": error.message}
            else:
                reached[f"{target:.2f}"] = point_record(evaluator.measure(plan, SPLITS))
        return reached

    for target in COMPRESSIONS:
        yield Task(f"curves/{name}/p{target:.2f}", partial(point, target))
    yield Task(f"curves/{name}/targets", targets)


def point_record(point: Point) -> Record:
    """Compression, accuracy and every ratio of a point on both splits; 95 % intervals of accuracy and KL on report."""
    record: Record = {"planned": point.planned, "stored": point.stored}
    for split in SPLITS:
        fidelity = point.fidelity(split)
        values = {name: fidelity.values[name] for name in METRIC_LABELS if name in fidelity.values}
        record[split] = {"accuracy": fidelity.accuracy, **values}
    report = point.fidelity("report")
    bounds = [bound for end in ("low", "high") if (bound := report.values.get(f"kl_div_{end}")) is not None]
    return record | {"interval": report.interval, "kl_interval": bounds or None}


def curves(records: Mapping[str, Record]) -> dict[str, Records]:
    """Select this part's records of a study, by recipe."""
    by_recipe: dict[str, Records] = {}
    for key, record in records.items():
        if key.startswith("curves/"):
            _, recipe, what = key.split("/")
            by_recipe.setdefault(recipe, {})[what] = record
    return by_recipe


def points(records: Records) -> list[Record]:
    """The measured points of one recipe by rising compression, without those out of reach."""
    measured = [r for what, r in records.items() if what.startswith("p") and "stored" in r]
    return sorted(measured, key=lambda point: point["target"])


def target_tables(by_recipe: Mapping[str, Records]) -> Iterator[Table]:
    """Tables of what every recipe removes at the target accuracies, where that was searched."""
    targets = sorted({t for records in by_recipe.values() for t in records.get("targets", {})}, reverse=True)
    if targets:
        text = (
            "Compression at a target accuracy, chosen by the search split; in brackets that of the report split with "
            "its 95 % interval."
        )
        rows = [
            [name, *(_target_cell(records.get("targets", {}).get(target, {})) for target in targets)]
            for name, records in by_recipe.items()
        ]
        yield Table(["recipe", *(f"at {float(target):g}" for target in targets)], rows, text=text)


def _target_cell(point: Record) -> str:
    if "stored" not in point:
        return "out of reach" if point else ""
    report = Fidelity(point["report"]["accuracy"], point["interval"], {})
    return f"{point['stored']:.3f} ({report})"


def _points_table(by_recipe: Mapping[str, Records]) -> Table:
    """Table of every point: its stored compression and what was measured on the report split."""
    every = [(name, point) for name, records in by_recipe.items() for point in points(records)]
    metrics = [name for name in METRIC_LABELS if any(name in point["report"] for _, point in every)]
    rows = []
    for name, point in every:
        cells = (number(point["report"].get(metric), 5 if metric == "kl_div" else 4) for metric in metrics)
        rows.append([f"`{name}`", f"{point['target']:g}", f"{point['stored']:.3f}", *cells])
    header = ["recipe", "p", "stored", *(METRIC_LABELS[metric] for metric in metrics)]
    return Table(header, rows, text="Report split; stored is the compression of the mildest step beyond p.")


def _draw(by_recipe: Mapping[str, Records], figure: Figure) -> None:
    """Draw curves from the uncompressed model on. Hollow marks are the points of the table of targets."""
    figure.suptitle("accuracy and KL against compression, report split (95 % intervals; hollow: at the targets)")
    accuracy, divergence = figure.subplots(1, 2)
    for index, (name, records) in enumerate(by_recipe.items()):
        reached = [point for point in records.get("targets", {}).values() if "stored" in point]
        for axes, shown, start, value, interval in (
            (accuracy, shown_loss, 1.0, "accuracy", "interval"),
            (divergence, lambda nats: max(nats, LEAST_KL), 0.0, "kl_div", "kl_interval"),
        ):
            places = [(point["stored"], shown(point["report"][value])) for point in points(records)]
            draw_line(axes, index, [(0.0, shown(start)), *places], name)
            band = [(0.0, start, start), *((p["stored"], *p[interval]) for p in points(records) if p.get(interval))]
            x, low, high = zip(*((x, shown(a), shown(b)) for x, a, b in band), strict=True)
            axes.fill_between(x, low, high, color=f"C{index % 10}", alpha=0.15, linewidth=0)
            marks = [(p["stored"], shown(p["report"][value])) for p in reached]
            draw_line(axes, index, marks, linestyle="", markersize=9, mfc="none", mew=1.3)
    worst = accuracy.dataLim.y1
    accuracy_axis(accuracy, worst)
    for target in TARGETS:
        if shown_loss(target) <= worst:
            accuracy.axhline(shown_loss(target), color="0.5", linewidth=0.8, linestyle=":")
    divergence.set(ylabel=KL_LABEL, yscale="log")
    for axes in (accuracy, divergence):
        axes.set_xlabel("compression (share of the KV cache removed)")
    draw_legend(accuracy, loc="lower left")
