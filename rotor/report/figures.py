"""Figures of a report as inline SVG that follows the page's light or dark colours. Needs matplotlib when called.

Figures are narrow, so that text stays readable at the width of a phone. Colours are drawn as placeholders and then
replaced by the page's CSS variables; text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from .axes import accuracy_axis, compression_axis, layer_colours, layer_legend, shown_loss
from .data import JOINT, SIDES, ReportData
from .style import STYLE

INK, KEYS, VALUES, MUTED, ACCENT = "#010203", "#010204", "#010205", "#010206", "#010207"
COLOURS = {INK: "currentColor", KEYS: "var(--keys)", VALUES: "var(--values)", MUTED: "var(--muted)"}
COLOURS[ACCENT] = "var(--accent)"
SIDE_NAMES = {"qk": "keys", "vo": "values", JOINT: "keys and values together"}

SVG_STYLE: dict[Any, Any] = {
    **STYLE,
    "svg.fonttype": "none",
    "savefig.transparent": True,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": MUTED,
    "axes.formatter.use_mathtext": False,
    "legend.frameon": False,
}
FLOOR = 1e-6
"""Smallest share that a logarithmic axis of a spectrum shows."""

SMALLEST_LOSS = 1e-9
"""Losses below it, in nats per token, are drawn at it."""


@dataclass(frozen=True)
class Drawing:
    """A figure to draw: how, into a matplotlib figure, and the text for those who do not see it."""

    draw: Callable[[Any], None]
    text: str


def figures(data: ReportData) -> dict[str, str]:
    """Name -> SVG, for each that has something to draw; those of singular values are `spectra-SIDE-N`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn: dict[str, str] = {}
    with matplotlib.rc_context(SVG_STYLE):
        for name, drawing in _drawings(data).items():
            figure = Figure(figsize=(4.4, 3.2))
            drawing.draw(figure)
            drawn[name] = _svg(figure, name, drawing.text)
    return drawn


def _drawings(data: ReportData) -> dict[str, Drawing]:
    found: dict[str, Drawing] = {}
    if data.points:
        text = f"Accuracy against compression: {len(data.points)} measured points; the numbers are in the table below."
        found["points"] = Drawing(lambda figure: _draw_points(figure.subplots(), data), text)
    if data.losses:
        text = f"KL divergence with one of {len(data.losses)} layers compressed alone; numbers below."
        found["losses"] = Drawing(lambda figure: _draw_losses(figure.subplots(), data), text)
    for side in SIDE_NAMES:
        names = [of.get(side) for of in data.spectra_of]
        for number, name in enumerate(name for name in dict.fromkeys(names) if name is not None):
            layers = [index for index, of in enumerate(names) if of == name]
            text = f"Singular values of the {SIDE_NAMES[side]} ({name}) of {len(layers)} layers, falling from 1"
            draw = partial(_draw_spectra, data=data, side=side, layers=layers, name=name)
            found[f"spectra-{side}-{number}"] = Drawing(draw, f"{text}{'; dots mark ranks' if data.ranks else ''}.")
    return found


def _draw_points(axes: Any, data: ReportData) -> None:
    """The uncompressed model, what was measured, what each target led to, and the targets as lines."""
    points = sorted(data.points, key=lambda p: p.stored)
    series = [
        ("search split", MUTED, [(p.stored, p.search, p.search_interval) for p in points if p.search is not None]),
        ("report split", KEYS, [(p.stored, p.report, p.interval) for p in points if p.report is not None]),
    ]
    losses: list[float] = []
    for label, colour, found in series:
        for stored, _, interval in found:
            if interval:
                high, low = map(shown_loss, interval)
                axes.vlines(stored, low, high, color=colour, linewidth=1.2, alpha=0.6)
                losses += [low, high]
        if found:
            x, y = [stored for stored, _, _ in found], [shown_loss(accuracy) for _, accuracy, _ in found]
            if colour == MUTED:  # a line from the uncompressed model
                axes.plot([0, *x], [shown_loss(1), *y], color=colour, linewidth=1, linestyle="--")
            axes.plot(x, y, "o", color=colour, markersize=4, label=f"{label}, 95 % interval")
            losses += y
    axes.plot([0], [shown_loss(1)], "s", color=INK, markersize=5, label="uncompressed")
    shown = next(p for p in points if p.chosen)
    value = shown.search if shown.report is None else shown.report
    assert value is not None
    axes.plot([shown.stored], [shown_loss(value)], "o", markersize=11, mfc="none", mew=2, color=ACCENT, label="shown")
    asked = {target.partition(" ")[0]: point for target, point in data.reached}
    if data.target is not None:
        asked.setdefault(f"{data.target:g}", None)
    for target, point in asked.items():
        colour = ACCENT if data.target is not None and target == f"{data.target:g}" else MUTED
        axes.axhline(shown_loss(float(target)), color=colour, linewidth=1, linestyle=":")
        losses.append(shown_loss(float(target)))
        if point is not None and point.search is not None:
            place = point.stored, shown_loss(point.search)
            axes.plot(*place, "D", color=MUTED, markersize=6, mfc="none", mew=1.4)
            axes.annotate(target, place, xytext=(4, 5), textcoords="offset points", fontsize=9, color=colour)
    if any(point is not None for point in asked.values()):
        axes.plot([], [], "D", color=MUTED, markersize=6, mfc="none", mew=1.4, label="what a target led to")
    accuracy_axis(axes, losses, "accuracy (ratio)")
    compression_axis(axes, max(p.stored for p in points), "compression (share of the KV cache removed)")
    axes.figure.legend(fontsize=8, loc="outside upper center", ncols=2)


def _draw_spectra(figure: Any, *, data: ReportData, side: str, layers: list[int], name: str) -> None:
    """One line a layer in the colour of its place in the model, with a dot at the layer's mean rank."""
    axes, colours = figure.subplots(), layer_colours(len(data.spectra))
    for index in layers:
        values = [max(value, FLOOR) for value in data.spectra[index][side]]
        share = [(i + 1) / len(values) for i in range(len(values))]
        axes.plot(share, values, color=colours[index], linewidth=1.2)
        if data.ranks:
            ranks = [(cell.values if side == "vo" else cell.keys).rank for cell in data.ranks[index]]
            kept = min(max(round(sum(ranks) / len(ranks)), 1), len(values))
            axes.plot([share[kept - 1]], [values[kept - 1]], "o", color=colours[index], markersize=4)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{SIDE_NAMES[side]}, {name}", fontsize=10)
    axes.set(xlabel="column (share of all columns)", ylabel="singular value over the largest")
    layer_legend(figure, axes, len(data.spectra))


def _draw_losses(axes: Any, data: ReportData) -> None:
    """Full dots at what the probe measured, hollow ones at what is predicted for the ranks that are shown."""
    for number, (side, colour) in enumerate(zip(SIDES, (KEYS, VALUES), strict=True)):
        name = SIDE_NAMES[side]
        x = [index + 0.24 * (number - 0.5) for index in range(len(data.losses))]
        probed = [max(loss.probed[number], SMALLEST_LOSS) for loss in data.losses]
        axes.plot(x, probed, "o", color=colour, markersize=6, label=f"{name}, probe")
        predicted = [max(loss.predicted[number], SMALLEST_LOSS) for loss in data.losses if loss.predicted]
        if predicted:
            axes.plot(x, predicted, "o", color=colour, markersize=7, mfc="none", mew=1.6, label=f"{name}, predicted")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="layer", ylabel="KL divergence (nats per token)")
    axes.figure.legend(fontsize=9, loc="outside upper center", ncols=2)


def _svg(figure: Any, name: str, text: str) -> str:
    """The figure as an <svg> element: no size, no clashing ids, no metadata, the page's colours, a text beside it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    svg = re.sub(r"<svg[^>]*>", f'<svg {box[0]} role="img" aria-label="{escape(text)}">', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    for placeholder, colour in COLOURS.items():
        svg = svg.replace(placeholder, colour)
    return svg
