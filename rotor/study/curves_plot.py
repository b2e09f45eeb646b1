"""Pictures of recipes side by side: accuracy and KL against compression, and their singular values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..report.axes import accuracy_axis, shown_loss
from ..report.style import MARKERS
from .tables import SIDE_LABELS, Curves, points

LEAST_KL = 1e-6
"""KL is drawn from here on; the uncompressed model, which has none, at it."""

TARGETS = (0.99, 0.95, 0.9)
FLOOR = 1e-6

Quantity = Callable[[str, str], str]
"""Of a name and a side: what singular values are of."""


def draw_curves(figure: Any, found: Curves) -> bool:
    """Accuracy and KL against stored compression, report split, from the uncompressed model on.

    Hollow marks are the points of the table: what each target accuracy led to, as the report split measured it.
    """
    measured = {recipe: points(records) for recipe, records in found.items() if points(records)}
    if not measured:
        return False
    figure.suptitle("accuracy and KL against compression, report split")
    accuracy, divergence = figure.subplots(1, 2)
    losses: list[float] = []
    for index, (recipe, of_recipe) in enumerate(measured.items()):
        crossings = [p for p in found[recipe].get("targets", {}).values() if "stored" in p]
        style = {"marker": MARKERS[index % len(MARKERS)], "color": f"C{index % 10}", "markersize": 5}
        places = [(p["stored"], shown_loss(p["report"]["accuracy"]), _loss_interval(p)) for p in of_recipe]
        losses += _series(accuracy, shown_loss(1), places, recipe, style)
        nats = [(p["stored"], max(p["report"]["kl_div"], LEAST_KL), _kl_interval(p)) for p in of_recipe]
        _series(divergence, LEAST_KL, nats, recipe, style)
        hollow = {**style, "markersize": 9, "mfc": "none", "linestyle": "", "mew": 1.3}
        for point in crossings:
            accuracy.plot([point["stored"]], [shown_loss(point["report"])], **hollow)
            losses.append(shown_loss(point["report"]))
            if point.get("kl_div") is not None:
                divergence.plot([point["stored"]], [max(point["kl_div"], LEAST_KL)], **hollow)
    accuracy_axis(accuracy, losses, "accuracy (ratio to the model)")
    for target in TARGETS:
        if shown_loss(target) <= max(losses):
            accuracy.axhline(shown_loss(target), color="0.5", linewidth=0.8, linestyle=":")
    for axes in (accuracy, divergence):
        axes.set_xlabel("compression (share of the KV cache removed)")
    divergence.set_ylabel("KL divergence (nats per token)")
    divergence.set_yscale("log")
    title = "95 % interval shaded; hollow: at the targets"
    accuracy.legend(fontsize=8, loc="lower left", title=title, title_fontsize=8).set_in_layout(False)
    return True


def draw_spectra(figure: Any, spectra: dict[str, dict[str, Any]], quantity: Quantity) -> bool:
    """Singular values over the largest, keys above values; those of different quantities in axes of their own."""
    if not spectra:
        return False
    rows: dict[str, dict[str, list[str]]] = {}
    for side in SIDE_LABELS:
        for name in spectra:
            rows.setdefault(side, {}).setdefault(quantity(name, side), []).append(name)
    columns = max(map(len, rows.values()))
    figure.set_size_inches(max(6, 5 * columns), 8)
    order = list(spectra)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (side, quantities) in zip(grid, rows.items(), strict=True):
        for axes in line[len(quantities) :]:
            axes.set_axis_off()
        for axes, (what, names) in zip(line, quantities.items(), strict=False):
            for name in names:
                values = spectra[name][side]
                share = [(i + 1) / len(values) for i in range(len(values))]
                shown = [max(value, FLOOR) for value in values]
                axes.plot(share, shown, color=f"C{order.index(name) % 10}", label=f"{name} ({len(values)} columns)")
            axes.set_yscale("log")
            axes.set(title=f"{SIDE_LABELS[side]} {what}".strip(), xlabel="column (share of all columns)")
            axes.legend(fontsize=8, loc="lower left").set_in_layout(False)
        line[0].set_ylabel("singular value over the largest")
    return True


Place = tuple[float, float, tuple[float, float] | None]
"""Compression, what is drawn there, and its interval as it is drawn."""


def _series(axes: Any, start: float, places: list[Place], label: str, style: dict[str, Any]) -> list[float]:
    """A line from the uncompressed model, with shaded intervals; returns all that was drawn."""
    axes.plot([0, *(x for x, _, _ in places)], [start, *(y for _, y, _ in places)], label=label, **style)
    bounded = [(0.0, (start, start)), *((x, bounds) for x, _, bounds in places if bounds)]
    low, high = zip(*(bounds for _, bounds in bounded), strict=True)
    axes.fill_between([x for x, _ in bounded], low, high, color=style["color"], alpha=0.15, linewidth=0)
    return [y for _, y, _ in places] + [y for _, bounds in bounded for y in bounds]


def _loss_interval(point: dict[str, Any]) -> tuple[float, float] | None:
    bounds = point["interval"]
    return None if bounds is None else (shown_loss(bounds[1]), shown_loss(bounds[0]))


def _kl_interval(point: dict[str, Any]) -> tuple[float, float] | None:
    """Older studies have none."""
    bounds = point.get("kl_interval")
    return None if bounds is None else (max(bounds[0], LEAST_KL), max(bounds[1], LEAST_KL))
