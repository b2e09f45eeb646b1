"""Figures of a report as inline SVG that follows the page's light or dark colours. Needs matplotlib when called.

Figures are narrow, so that text stays readable at the width of a phone. Colours are drawn as placeholders and then
replaced by the page's CSS variables; text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

from .data import SIDES, ReportData
from .style import STYLE

INK, KEYS, VALUES, MUTED, ACCENT = "#010203", "#010204", "#010205", "#010206", "#010207"
COLOURS = {INK: "currentColor", KEYS: "var(--keys)", VALUES: "var(--values)", MUTED: "var(--muted)"}
COLOURS[ACCENT] = "var(--accent)"
SIDE_NAMES = {"qk": "keys", "vo": "values"}

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

LOWEST_ACCURACY = 0.6
"""The axis of accuracy ends here; what lies lower is in the table."""


def figures(data: ReportData) -> dict[str, str]:
    """Section name -> SVG, for each section that has something to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn: dict[str, str] = {}
    with matplotlib.rc_context(SVG_STYLE):
        for name, (present, draw, text) in _figures(data).items():
            if present:
                figure = Figure(figsize=(4.4, 3.2))
                draw(figure.subplots())
                drawn[name] = _svg(figure, name, text)
    return drawn


def _figures(data: ReportData) -> dict[str, tuple[bool, Callable[[Any], None], str]]:
    """Name -> (whether there is anything to draw, how, the text for those who do not see it)."""
    found: dict[str, tuple[bool, Callable[[Any], None], str]] = {
        "points": (
            bool(data.points),
            lambda axes: _draw_points(axes, data),
            f"Accuracy against compression: {len(data.points)} measured points; the numbers are in the table below.",
        ),
        "losses": (
            bool(data.losses),
            lambda axes: _draw_losses(axes, data),
            f"KL divergence with one of {len(data.losses)} layers compressed alone; numbers below.",
        ),
    }
    for side in SIDES:
        text = (
            f"Singular values of the {SIDE_NAMES[side]} of {len(data.spectra)} layers, falling from 1; dots mark ranks."
        )
        found[f"spectra-{side}"] = (bool(data.spectra), lambda axes, s=side: _draw_spectra(axes, data, s), text)  # type: ignore[misc]
    return found


def _draw_points(axes: Any, data: ReportData) -> None:
    points = sorted(data.points, key=lambda p: p.stored)
    series = [
        ("search split", MUTED, [(p.stored, p.search, p.search_interval) for p in points if p.search is not None]),
        ("report split", KEYS, [(p.stored, p.report, p.interval) for p in points if p.report is not None]),
    ]
    for label, colour, found in series:
        bounded = [(x, *interval) for x, _, interval in found if interval]
        if bounded:
            axes.vlines(*zip(*bounded, strict=True), color=colour, linewidth=1.2, alpha=0.6)
        if found:
            x, y, _ = zip(*found, strict=True)
            line = "--" if colour == MUTED else ""
            axes.plot(x, y, color=colour, marker="o", markersize=4, linestyle=line, label=f"{label}, 95 % interval")
    shown = next((p.search if p.report is None else p.report, p.stored) for p in points if p.chosen)
    axes.plot([shown[1]], [shown[0]], "o", markersize=11, mfc="none", mew=2, color=ACCENT, label="shown")
    if data.target is not None:
        axes.axhline(data.target, color=ACCENT, linewidth=1, linestyle=":", label=f"target {data.target:g}")
    axes.set(xlabel="compression (share of the KV cache removed)", ylabel="accuracy (ratio)")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], min(LOWEST_ACCURACY, (shown[0] or 0) - 0.1)))
    axes.legend(fontsize=9, loc="lower left")


def _draw_spectra(axes: Any, data: ReportData, side: str) -> None:
    """One line a layer, from faint (first) to strong (last), with a dot at the layer's mean rank."""
    colour = KEYS if side == "qk" else VALUES
    layers = len(data.spectra)
    for index, layer in enumerate(data.spectra):
        values = [max(value, FLOOR) for value in layer[side]]
        share = [(i + 1) / len(values) for i in range(len(values))]
        alpha = 0.25 + 0.75 * index / max(layers - 1, 1)
        axes.plot(share, values, color=colour, alpha=alpha, linewidth=1.3)
        if data.ranks:
            ranks = [cell.qk_rank if side == "qk" else cell.v_rank for cell in data.ranks[index]]
            kept = min(max(round(sum(ranks) / len(ranks)), 1), len(values))
            axes.plot([share[kept - 1]], [values[kept - 1]], "o", color=colour, markersize=4, alpha=alpha)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(
        title=f"{SIDE_NAMES[side]}", xlabel="column (share of all columns)", ylabel="singular value over the largest"
    )


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
