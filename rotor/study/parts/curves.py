"""`curves`: of each recipe spectra, points over compression, and the strongest compression at each target accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...data.splits import SPLITS
from ...recipe import Recipe
from ...report.style import accuracy_axis, shown_loss
from ...search.search import most_points
from ..bases import SIDE_LABELS, mean_spectra
from ..context import TARGETS, StudyContext
from ..part import Part, Task
from ..plots import KL_LABEL, LEAST_KL, draw_legend, draw_line
from ..records import METRIC_LABELS, first_candidates, point_record, stage_seconds, target_record
from ..store import StudyStore
from ..tables import Table, number

COMPRESSIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

Records = dict[str, dict[str, Any]]
"""Of one recipe, by what they are: spectra, targets, p0.10 ..."""

Draw = Callable[[Any], None]


class Curves(Part):
    name = "curves"
    csv = "results.csv"
    title = "Recipes"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in study.plan.recipes.items():
            yield from curve_tasks(study, self.name, name, recipe, name)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        found = self.shown(store)
        if found:
            yield Table((), (), self.title)
            yield from _target_tables(found)
            yield from _metric_tables(found)

    def rows(self, store: StudyStore) -> Iterator[dict[str, Any]]:
        """One a recipe and compression, with the metrics of both splits."""
        for recipe, records in curves(store, self.name).items():
            for point in points(records):
                low, high = point["interval"] or ("", "")
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

    def plots(self, store: StudyStore) -> dict[str, Draw]:
        found = curves(store, self.name)
        spectra = {name: records["spectra"] for name, records in found.items() if "spectra" in records}
        plots = curves_plot("recipes", found)
        return plots | {"spectra": partial(_draw_spectra, store, spectra)} if spectra else plots

    def shown(self, store: StudyStore) -> dict[str, Records]:
        """What tables and plots show, by recipe."""
        return curves(store, self.name)


def curve_tasks(study: StudyContext, part: str, name: str, recipe: Recipe, folder: str) -> Iterator[Task]:
    """Of one recipe, whose run is kept in a folder below runs/."""
    needs = {folder: recipe}

    def spectra() -> dict[str, Any]:
        run = study.run(folder, recipe)
        return {**mean_spectra(first_candidates(run)), "seconds": stage_seconds(run)}

    def point(target: float) -> dict[str, Any]:
        measurer, path = study.path(folder, recipe)
        plan = path.at_compression(target)
        if plan is None:
            return {"target": target, "out_of_reach": round(path.steps()[-1].stored, 6)}
        return {**point_record(measurer.measure(plan)), "target": target}

    def targets() -> dict[str, Any]:
        return study.at_targets(*study.path(folder, recipe), recipe, target_record)

    yield Task(f"{part}/{name}/spectra", spectra, needs, points=0)
    for target in COMPRESSIONS:
        yield Task(f"{part}/{name}/p{target:.2f}", partial(point, target), needs)
    most = len(TARGETS) * most_points(recipe.search.resolution)
    yield Task(f"{part}/{name}/targets", targets, needs, points=most)


def curves(store: StudyStore, part: str) -> dict[str, Records]:
    """Records of a part by recipe."""
    found: dict[str, Records] = {}
    for key, record in store.part(part).items():
        recipe, _, what = key.rpartition("/")
        found.setdefault(recipe, {})[what] = record
    return found


def points(records: Records) -> list[dict[str, Any]]:
    """The measured points of one recipe by rising compression, without those out of reach."""
    measured = [r for what, r in records.items() if what.startswith("p") and "stored" in r]
    return sorted(measured, key=lambda point: point["target"])


def _target_tables(found: Mapping[str, Records]) -> Iterator[Table]:
    targets = sorted({t for records in found.values() for t in records.get("targets", {})}, reverse=True)
    if targets:
        text = (
            "Compression at a target accuracy, chosen by the search split; in brackets that of the report split with "
            "its 95 % interval."
        )
        rows = [
            [f"`{name}`", *(_target_cell(records.get("targets", {}).get(target, {})) for target in targets)]
            for name, records in found.items()
        ]
        yield Table(["recipe", *(f"at {float(target):g}" for target in targets)], rows, text=text)


def _target_cell(point: Mapping[str, Any]) -> str:
    if "stored" not in point:
        return "out of reach" if point else ""
    interval = point.get("interval")
    bounds = f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""
    return f"**{point['stored']:.3f}** ({point['report']:.4f}{bounds})"


def _metric_tables(found: Mapping[str, Records]) -> Iterator[Table]:
    """One a metric, report split, and one of stored compression: recipes down, compressions across."""
    targets = sorted({p["target"] for records in found.values() for p in points(records)})
    header = ["recipe", *(f"p = {target:g}" for target in targets)]

    def table(cell: Callable[[dict[str, Any]], str], text: str) -> Table:
        by_recipe = {name: {p["target"]: cell(p) for p in points(records)} for name, records in found.items()}
        return Table(header, [[f"`{n}`", *(of.get(t, "") for t in targets)] for n, of in by_recipe.items()], text=text)

    for metric, label in METRIC_LABELS.items():
        one = table(partial(_metric_cell, metric), f"{label[0].upper()}{label[1:]}, report split:")
        if any(cell for row in one.rows for cell in row[1:]):
            yield one
    if targets:
        text = "Compression as stored at each of these (the mildest step beyond it):"
        yield table(lambda point: f"{point['stored']:.3f}", text)


def _metric_cell(metric: str, point: dict[str, Any]) -> str:
    return number(point["report"].get(metric), 5 if metric == "kl_div" else 4)


def curves_plot(name: str, found: Mapping[str, Records]) -> dict[str, Draw]:
    """Accuracy and KL against stored compression, by file name; nothing without points."""
    return {name: partial(_draw_curves, found)} if any(map(points, found.values())) else {}


def _draw_curves(found: Mapping[str, Records], figure: Any) -> None:
    """From the uncompressed model on. Hollow marks are the points of the table: what each target accuracy led to."""
    figure.suptitle("accuracy and KL against compression, report split (95 % intervals; hollow: at the targets)")
    accuracy, divergence = figure.subplots(1, 2)
    for index, (name, records) in enumerate(found.items()):
        reached = [point for point in records.get("targets", {}).values() if "stored" in point]
        for axes, shown, start, value, interval, at_target in (
            (accuracy, shown_loss, 1.0, "accuracy", "interval", "report"),
            (divergence, _shown_kl, 0.0, "kl_div", "kl_interval", "kl_div"),
        ):
            places = [(point["stored"], shown(point["report"][value])) for point in points(records)]
            draw_line(axes, index, [(0.0, shown(start)), *places], name)
            band = [(0.0, start, start), *((p["stored"], *p[interval]) for p in points(records) if p.get(interval))]
            x, low, high = zip(*((x, shown(a), shown(b)) for x, a, b in band), strict=True)
            axes.fill_between(x, low, high, color=f"C{index % 10}", alpha=0.15, linewidth=0)
            marks = [(p["stored"], shown(p[at_target])) for p in reached if p.get(at_target) is not None]
            draw_line(axes, index, marks, linestyle="", markersize=9, mfc="none", mew=1.3)
    worst = accuracy.dataLim.y1
    accuracy_axis(accuracy, [worst], "accuracy (ratio to the model)")
    for target in TARGETS:
        if shown_loss(target) <= worst:
            accuracy.axhline(shown_loss(target), color="0.5", linewidth=0.8, linestyle=":")
    divergence.set(ylabel=KL_LABEL, yscale="log")
    for axes in (accuracy, divergence):
        axes.set_xlabel("compression (share of the KV cache removed)")
    draw_legend(accuracy, loc="lower left")


def _shown_kl(nats: float) -> float:
    return max(nats, LEAST_KL)


def _draw_spectra(store: StudyStore, spectra: Mapping[str, Mapping[str, Any]], figure: Any) -> None:
    """Singular values over the largest, keys above values; those of different quantities in axes of their own."""
    figure.suptitle("mean singular values of the groups")
    rows: dict[str, dict[str, list[str]]] = {side: {} for side in SIDE_LABELS}
    for side, quantities in rows.items():
        for name in spectra:
            quantities.setdefault(_quantity(store, name, side), []).append(name)
    columns = max(map(len, rows.values()))
    figure.set_size_inches(max(6, 5 * columns), 8)
    for line, (side, quantities) in zip(figure.subplots(2, columns, squeeze=False), rows.items(), strict=True):
        for axes in line[len(quantities) :]:
            axes.set_axis_off()
        for axes, (what, names) in zip(line, quantities.items(), strict=False):
            for name in names:
                values = spectra[name][side]
                places = [((i + 1) / len(values), max(value, 1e-6)) for i, value in enumerate(values)]
                draw_line(axes, list(spectra).index(name), places, f"{name} ({len(values)} channels)", marker="")
            axes.set(title=f"{SIDE_LABELS[side]} {what}".strip(), xlabel="channel (share of all)", yscale="log")
            draw_legend(axes, loc="lower left")
        line[0].set_ylabel("singular value over the largest")


def _quantity(store: StudyStore, recipe: str, side: str) -> str:
    """What the singular values of a recipe are of; those of different ones belong into different axes."""
    settings = store.settings["recipes"][recipe]
    shared = " (groups.joint)" if settings["groups"].get("joint") else ""  # of keys and values stacked
    where = {"pre": ", before RoPE", "post": ", after RoPE", "block": ", in blocks"}
    at = where.get(settings["groups"]["domain"], "") if side == "qk" else ""
    return f"by {settings['bases'][side]}{at}{shared}"
