"""Figures of a report as images with their SVG inside, and what studies' plots share with them. Needs matplotlib when
called.

Figures are narrow, so that text stays readable at the width of a phone.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, Any

from .data import ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEYS, MUTED, ACCENT = "#1f5fbf", "#8a93a3", "#0f7b53"
SIDE_NAMES = {"qk": "keys", "vo": "values", "joint": "keys and values"}

STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "svg.hashsalt": "rotor",
}

SVG_STYLE: dict[Any, Any] = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "rotor"}
"""Style of figures; the same data gives the same bytes."""

TITLE_WIDTH = 48
"""Characters of a line of a title that fit into a figure."""

FLOOR = 1e-6
"""Smallest share that a logarithmic axis of a spectrum shows."""

MARKERS = "osD^vPX*<>"
"""Markers of the lines of a plot, in turn."""

LOSS_FLOOR = 5e-4
"""Least loss of accuracy that is drawn; smaller ones and 0 are drawn there, as a logarithmic axis has no 0."""

LOSS_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def figures(data: ReportData) -> dict[str, str]:
    """Images by name, for each figure that has something to draw; those of singular values are `spectra-SIDE`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn: dict[str, str] = {}
    with matplotlib.rc_context(SVG_STYLE):
        for name, (draw, text) in _drawings(data).items():
            figure = Figure(figsize=(4.4, 3.2))
            draw(figure)
            figure.savefig(buffer := io.BytesIO(), format="svg", metadata={"Date": None})
            svg = b64encode(buffer.getvalue()).decode()
            drawn[name] = f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{svg}">'
    return drawn


def _drawings(data: ReportData) -> dict[str, tuple[Callable[[Figure], None], str]]:
    """Functions that draw on a matplotlib figure, each with a text for those who do not see it, by name."""
    drawings: dict[str, tuple[Callable[[Figure], None], str]] = {}
    if data.points:
        text = f"Accuracy against compression: {len(data.points)} measured points; the numbers are in the table below."
        drawings["points"] = partial(_draw_points, data), text
    for side, name in data.spectra_of.items():
        text = f"Singular values of the {SIDE_NAMES[side]} ({name}) of {len(data.spectra)} layers, falling from 1"
        draw = partial(_draw_spectra, data=data, side=side, name=name)
        drawings[f"spectra-{side}"] = draw, f"{text}{'; dots mark ranks' if data.ranks else ''}."
    return drawings


def _draw_points(data: ReportData, figure: Figure) -> None:
    """Draw the uncompressed model, measured points, and the target as a line."""
    points = sorted(data.points, key=lambda p: p.stored)
    axes = figure.subplots()
    losses = list[float]()
    for split, colour in (("search", MUTED), ("report", KEYS)):
        measured = [(point.stored, getattr(point, split)) for point in points if getattr(point, split) is not None]
        x, y = [stored for stored, _ in measured], [shown_loss(fidelity.accuracy) for _, fidelity in measured]
        for stored, fidelity in measured:
            high, low = map(shown_loss, fidelity.interval)
            axes.vlines(stored, low, high, color=colour, linewidth=1.2, alpha=0.6)
            losses += [low, high]
        if measured:
            if split == "search":  # a line from the uncompressed model
                axes.plot([0, *x], [shown_loss(1), *y], color=colour, linewidth=1, linestyle="--")
            axes.plot(x, y, "o", color=colour, markersize=4, label=f"{split} split, 95 % interval")
            losses += y
    axes.plot([0], [shown_loss(1)], "s", color="black", markersize=5, label="uncompressed")
    shown = data.chosen
    assert shown is not None
    fidelity = shown.report or shown.search
    assert fidelity is not None
    here = [shown.stored], [shown_loss(fidelity.accuracy)]
    axes.plot(*here, "o", markersize=11, mfc="none", mew=2, color=ACCENT, label="shown")
    if data.target is not None:
        axes.axhline(shown_loss(data.target), color=ACCENT, linewidth=1, linestyle=":")
        losses.append(shown_loss(data.target))
    accuracy_axis(axes, losses, "accuracy (ratio)")
    axes.set_xlabel("compression (share of the KV cache removed)")
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)


def _draw_spectra(figure: Figure, *, data: ReportData, side: str, name: str) -> None:
    """Draw one line a layer in the colour of its place in the model, with a dot at the layer's mean rank."""
    axes = figure.subplots()
    colours = layer_colours(len(data.spectra))
    for index, layer in enumerate(data.spectra):
        if side not in layer:
            continue
        values = [max(value, FLOOR) for value in layer[side]]
        share = [(i + 1) / len(values) for i in range(len(values))]
        axes.plot(share, values, color=colours[index], linewidth=1.2)
        if data.ranks:
            ranks = [(group.values if side == "vo" else group.key).rank for group in data.ranks[index]]
            kept = min(max(round(sum(ranks) / len(ranks)), 1), len(values))
            axes.plot([share[kept - 1]], [values[kept - 1]], "o", color=colours[index], markersize=4)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(fill(f"{SIDE_NAMES[side]}, {name}", TITLE_WIDTH), fontsize=10)
    axes.set(xlabel="channel (share of all)", ylabel="singular value over the largest")
    layer_legend(figure, axes, len(data.spectra))


def shown_loss(accuracy: float) -> float:
    """The place of an accuracy on `accuracy_axis`: what is lost, within the axis."""
    return min(max(1 - accuracy, LOSS_FLOOR), 1.0)


def accuracy_axis(axes: Axes, losses: list[float], label: str) -> None:
    """An axis of accuracy, best at the top, logarithmic in what is lost: from 0.9 to 0.99 it is as far as on to 0.999.

    Args:
        losses: all that `shown_loss` gave for what is drawn.
    """
    worst = max([*losses, 0.01])
    axes.set_yscale("log")
    axes.set_ylim(min(1.3 * worst, 1.1), 0.8 * LOSS_FLOOR)
    ticks = [tick for tick in LOSS_TICKS if tick <= 1.3 * worst]
    axes.set_yticks([LOSS_FLOOR, *ticks], [f"≥ {1 - LOSS_FLOOR:g}", *(f"{1 - tick:g}" for tick in ticks)])
    axes.set_yticks([], minor=True)
    axes.set_ylabel(label)


def layer_colours(layers: int) -> list[tuple[float, float, float, float]]:
    """A colour for each layer, from the first to the last."""
    from matplotlib import colormaps

    return [colormaps["viridis"](index / max(layers - 1, 1)) for index in range(layers)]


def layer_legend(figure: Figure, axes: Axes, layers: int) -> None:
    """A scale of `layer_colours` beside axes, with numbers of layers; nothing for one layer."""
    if layers < 2:
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    shown = ScalarMappable(Normalize(-0.5, layers - 0.5), "viridis")
    figure.colorbar(shown, ax=axes, ticks=MaxNLocator(8, integer=True), label="layer")
