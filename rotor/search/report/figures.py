"""Figures of a report: accuracy against compression, what each layer keeps, and singular values.

They are SVG text, narrow, so that text stays readable at the width of a phone. Colours are CSS (`var(--keys)`), so that
a figure follows its page, light or dark. The same data gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ...checkpoint.layout import GroupLayout
from ...checkpoint.rows import WIDTHS, NumberRow, Row
from ..evaluation.accuracy import Fidelity
from .collect import WHOLE_BITS, Cell, ReportData

SIDE_NAMES = {"qk": "keys", "vo": "values", "joint": "keys and values"}

SPLIT_COLOURS = {"search": "var(--muted)", "report": "var(--keys)"}

FLOOR = 1e-6
"""Smallest share that a logarithmic axis of a spectrum shows."""

LOSS_FLOOR = 5e-4
"""Least loss of accuracy that is drawn; smaller ones and 0 are drawn there, as a logarithmic axis has no 0."""

LOSS_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

LINE_POINTS = 100
"""Points of a drawn line at most."""


FONT_SIZE = 12
CHARACTER = 0.56 * FONT_SIZE
"""About the width of a character, by which labels get room."""

WIDTH, LEFT, RIGHT, BOTTOM = 440, 64, 12, 44
LEGEND_LINE = 18


def figures(data: ReportData) -> dict[str, str]:
    """SVG by name, for each figure that has something to draw; those of singular values are `spectra-SIDE`."""
    drawn: dict[str, str] = {}
    if data.points:
        drawn["points"] = draw_points(data)
    if data.ranks:
        drawn["layers"] = draw_layers(data)
    for side, name in data.spectra_of.items():
        drawn[f"spectra-{side}"] = draw_spectra(data, side, name)
    return drawn


def draw_points(data: ReportData) -> str:
    """Measured points with their intervals, zoomed to them, and the target as a line."""
    points = sorted(data.points, key=lambda point: point.stored)
    measured = [
        (split, point.stored, fidelity)
        for split in SPLIT_COLOURS
        for point in points
        if (fidelity := getattr(point, split)) is not None
    ]
    losses = [shown_loss(bound) for _, _, fidelity in measured for bound in (fidelity.accuracy, *fidelity.interval)]
    if data.target is not None:
        losses.append(shown_loss(data.target))
    stored = [point.stored for point in points]
    room = max(0.1 * (stored[-1] - stored[0]), 0.01)
    across = Axis.linear(stored[0] - room, stored[-1] + room, "compression (share of the KV cache removed)")
    chart = Chart(across, accuracy_axis(losses))
    for split, colour in SPLIT_COLOURS.items():
        if any(split == measured_split for measured_split, _, _ in measured):
            chart.legend(f"{split} split, 95 % interval", colour)
    if data.target is not None:
        chart.legend(f"target {data.target:g}", "var(--accent)", shape="line")
        level = shown_loss(data.target)
        chart.line([(across.low, level), (across.high, level)], "var(--accent)", dashes="2 3")
    for split, share, fidelity in measured:
        ends = [(share, shown_loss(bound)) for bound in fidelity.interval]
        chart.line(ends, SPLIT_COLOURS[split], width=1.2)
    for split, share, fidelity in measured:
        said = f"{share:.3f} removed: {fidelity} on the {split} split"
        chart.dot((share, shown_loss(fidelity.accuracy)), SPLIT_COLOURS[split], said)
    shown = data.chosen
    assert shown is not None
    shown_fidelity: Fidelity | None = shown.report or shown.search
    assert shown_fidelity is not None
    chart.ring((shown.stored, shown_loss(shown_fidelity.accuracy)), "var(--accent)")
    chart.legend("the point shown here", "var(--accent)", shape="ring")
    return chart.svg(
        f"Accuracy against compression: {len(points)} measured points; the numbers are in the table below."
    )


def draw_layers(data: ReportData) -> str:
    """A bar a layer, as long as the bits that it keeps of a token, in parts by kind and by bits of a channel."""
    layers = [_parts(groups) for groups in data.ranks]
    longest = max(sum(bits for _, _, bits in parts) for parts in layers) or 1
    thickness = max(5.0, min(14.0, 420 / len(layers)))
    every = -(-len(layers) // 16)
    ticks = [(layer, str(layer)) for layer in range(0, len(layers), every)]
    across = Axis.linear(0, longest, "bits of a token that the layer keeps")
    chart = Chart(across, Axis(len(layers) - 0.5, -0.5, "layer", ticks), height=max(thickness * len(layers), 90))
    coded = any(isinstance(width, int) for parts in layers for _, width, _ in parts)
    for side, width in sorted({(side, width) for parts in layers for side, width, _ in parts}, key=_order):
        label = SIDE_NAMES[side] if width is None else f"{width} bits"
        if coded and len({side for parts in layers for side, _, _ in parts}) > 1:
            label = f"{SIDE_NAMES[side]}, {label}"
        chart.legend(label, _part_colour(side, width), shape="box")
    for layer, (groups, parts, head_dim) in enumerate(zip(data.ranks, layers, data.head_dims, strict=True)):
        boxes, begin = [], 0
        for side, width, bits in parts:
            ends = (begin, layer - 0.42), (begin + bits, layer + 0.42)
            boxes.append(chart.box(*ends, _part_colour(side, width)))
            begin += bits
        chart.group(boxes, f"layer {layer}: {_kept(groups, head_dim)}")
    return chart.svg(f"Bits of a token that each of {len(layers)} layers keeps; the numbers are in the table below.")


def _parts(groups: Sequence[GroupLayout]) -> list[tuple[str, int | None, int]]:
    """Parts of a layer's bar: latent, bits of its channels (None for numbers), and bits of them all."""
    totals: dict[tuple[str, int | None], int] = {}
    for group in groups:
        latents: list[tuple[str, Row]] = [("joint", group.key)] if group.joint else [("qk", group.key)]
        if not group.joint:
            latents.append(("vo", group.values))
        for side, row in latents:
            if isinstance(row, NumberRow):
                counts: dict[int | None, int] = {None: WHOLE_BITS * row.rank}
            else:
                counts = {width: width * row.bits.count(width) for width in WIDTHS}
            for width, bits in counts.items():
                totals[side, width] = totals.get((side, width), 0) + bits
    return sorted(((*part, bits) for part, bits in totals.items() if bits), key=lambda part: _order(part[:2]))


def _order(part: tuple[str, int | None]) -> tuple[int, int]:
    """Where a part stands in its bar: keys before values, and the most bits first."""
    side, width = part
    return list(SIDE_NAMES).index(side), -(width or WHOLE_BITS)


def _kept(groups: Sequence[GroupLayout], head_dim: int) -> str:
    """Say what each latent of a layer keeps."""
    cells = [
        Cell.of(group, side, head_dim)
        for group in groups
        for side in (("keys",) if group.joint else ("keys", "values"))
    ]
    return "; ".join(
        f"KV heads {', '.join(map(str, cell.kv_heads))}: {cell.rank} of {cell.channels} channels, "
        f"{cell.bits} of {cell.whole_bits} bits{cell.widths and f' ({cell.widths})'}"
        for cell in cells
    )


def _part_colour(side: str, width: int | None) -> str:
    """Colour of a part of a bar: the more bits a channel has, the stronger."""
    colour = "var(--values)" if side == "vo" else "var(--keys)"
    strength = 100 if width is None else round(20 + 80 * (width / WHOLE_BITS) ** 0.8)
    return f"color-mix(in srgb, {colour} {strength}%, var(--card))"


def draw_spectra(data: ReportData, side: str, name: str) -> str:
    """A line a layer in the colour of its place in the model, with a dot at the layer's mean rank."""
    ticks = [(10.0**power, f"1e{power}" if power < -3 else f"{10.0**power:g}") for power in range(-6, 1)]
    down = Axis(FLOOR, 1.0, "singular value over the largest", ticks, log=True)
    several = len(data.spectra) > 1
    chart = Chart(Axis.linear(0, 1, "channel (share of all)"), down, right=54 if several else 12)
    colours = layer_colours(len(data.spectra))
    chart.legend(f"{SIDE_NAMES[side]}, {name}", "none", shape="box")
    for index, layer in enumerate(data.spectra):
        if side not in layer:
            continue
        values = [max(value, FLOOR) for value in layer[side]]
        every = -(-len(values) // LINE_POINTS)
        drawn = sorted({*range(0, len(values), every), len(values) - 1})
        chart.line([((i + 1) / len(values), values[i]) for i in drawn], colours[index], width=1.2)
        if data.ranks:
            ranks = [(group.values if side == "vo" else group.key).rank for group in data.ranks[index]]
            kept = min(max(round(sum(ranks) / len(ranks)), 1), len(values))
            said = f"layer {index}: {kept} of {len(values)} channels"
            chart.dot((kept / len(values), values[kept - 1]), colours[index], said, radius=3)
    if several:
        chart.colour_scale(colours, "layer")
    text = f"Singular values of the {SIDE_NAMES[side]} ({name}) of {len(data.spectra)} layers, falling from 1"
    return chart.svg(f"{text}{'; dots mark ranks' if data.ranks else ''}.")


def shown_loss(accuracy: float) -> float:
    """The place of an accuracy on `accuracy_axis`: what is lost, within the axis."""
    return min(max(1 - accuracy, LOSS_FLOOR), 1.0)


def accuracy_axis(losses: Sequence[float]) -> Axis:
    """An axis of accuracy, best at the top, logarithmic in what is lost: from 0.9 to 0.99 it is as far as on to 0.999.

    Args:
        losses: all that `shown_loss` gave for what is drawn; the axis ends a little beyond them.
    """
    best, worst = max(min(losses) / 1.4, 0.8 * LOSS_FLOOR), min(1.4 * max(losses), 1.1)
    every = (LOSS_FLOOR, *LOSS_TICKS)
    while len(ticks := [tick for tick in every if best <= tick <= worst]) < 2:
        best, worst = max(best / 1.4, 0.8 * LOSS_FLOOR), min(1.4 * worst, 1.1)
    labels = [(tick, f"{'≥ ' if tick == LOSS_FLOOR else ''}{1 - tick:g}") for tick in ticks]
    return Axis(worst, best, "accuracy (ratio)", labels, log=True)


def layer_colours(layers: int) -> list[str]:
    """A colour for each layer, from the first, violet, to the last, orange; told apart on light and on dark."""
    return [f"hsl({265 - 235 * index / max(layers - 1, 1):.1f} 60% 52%)" for index in range(layers)]


@dataclass(frozen=True)
class Axis:
    """An axis from `low`, which is left or at the bottom, to `high`; `low` above `high` turns it round.

    ticks: (value, label). log: equal steps are equal ratios.
    """

    low: float
    high: float
    label: str
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at `low` to 1 at `high`."""
        low, high, value = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (value - low) / (high - low)

    @classmethod
    def linear(cls, low: float, high: float, label: str) -> Axis:
        """An axis with about five ticks at round numbers."""
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step *= next(times for times in (1, 2, 2.5, 5, 10) if times * step * 5 >= high - low)
        first = math.ceil(low / step - 1e-9)
        values = [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
        return cls(low, high, label, [(value, f"{value:,.10g}") for value in values])


class Chart:
    """A chart that is drawn upon, and then written by `svg`."""

    def __init__(self, x: Axis, y: Axis, height: float = 280, right: float = RIGHT) -> None:
        """height: of the plot alone. right: room beside it."""
        self.x, self.y = x, y
        self.width, self.height, self.right = WIDTH, height, right
        self.marks: list[str] = []
        self.entries: list[tuple[str, str]] = []

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The place of a point of the axes within the plot."""
        across = (self.width - LEFT - self.right) * self.x.share(x)
        return round(LEFT + across, 1), round(self.height * (1 - self.y.share(y)), 1)

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1.5, dashes: str = "") -> None:
        """Draw a line through points."""
        places = " ".join(f"{x:g},{y:g}" for x, y in (self.place(*point) for point in points))
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.marks.append(
            f'<polyline points="{places}" style="fill:none;stroke:{colour}" stroke-width="{width:g}"{dashed}/>'
        )

    def dot(self, point: tuple[float, float], colour: str, said: str = "", *, radius: float = 4.5) -> None:
        """Draw a dot; `said` is what a pointer on it shows."""
        self._round(point, f"fill:{colour}", radius, said)

    def ring(self, point: tuple[float, float], colour: str) -> None:
        """Draw a ring around a point."""
        self._round(point, f"fill:none;stroke:{colour}", 9, "", ' stroke-width="2"')

    def box(self, low: tuple[float, float], high: tuple[float, float], colour: str) -> str:
        """A box between two points, which `group` takes."""
        (left, bottom), (right, top) = self.place(*low), self.place(*high)
        top, bottom = sorted((top, bottom))
        return (
            f'<rect x="{left:g}" y="{top:g}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
            f'style="fill:{colour}"/>'
        )

    def group(self, boxes: Sequence[str], said: str) -> None:
        """Draw boxes, for all of which a pointer shows the same."""
        self.marks.append(f"<g><title>{escape(said)}</title>{''.join(boxes)}</g>")

    def legend(self, label: str, colour: str, *, shape: str = "dot") -> None:
        """Add an entry above the plot. shape: `dot`, `ring`, `line` or `box`."""
        drawn = {
            "dot": f'<circle cx="8" cy="-4" r="4" style="fill:{colour}"/>',
            "ring": f'<circle cx="8" cy="-4" r="5" style="fill:none;stroke:{colour}" stroke-width="2"/>',
            "line": f'<path d="M0-4h16" style="stroke:{colour}" stroke-width="1.5" stroke-dasharray="2 3"/>',
            "box": f'<rect y="-10" width="14" height="11" style="fill:{colour}"/>',
        }
        self.entries.append((drawn[shape], label))

    def colour_scale(self, colours: Sequence[str], label: str) -> None:
        """Draw a scale of colours, the first at the bottom, in the room to the right of the plot, with numbers."""
        left, step = self.width - self.right + 10, self.height / len(colours)
        for index, colour in enumerate(colours):
            top = self.height - (index + 1) * step
            self.marks.append(
                f'<rect x="{left:g}" y="{top:.1f}" width="10" height="{step + 0.3:.1f}" style="fill:{colour}"/>'
            )
        every = max(1, len(colours) // 4)
        for index in range(0, len(colours), every):
            self.marks.append(_text(left + 14, self.height - (index + 0.5) * step + 4, str(index), "start"))
        self.marks.append(_text(left, self.height + 18, label, "start"))

    def svg(self, described: str) -> str:
        """The chart, `described` for those who do not see it."""
        legend, lines = self._legend()
        top = LEGEND_LINE * lines + 10
        whole = f"0 0 {self.width:g} {top + self.height + BOTTOM:g}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{whole}" role="img" aria-label="{escape(described)}" '
            f'font-size="{FONT_SIZE}">{legend}<g transform="translate(0 {top:g})">'
            f"{self._axes()}{''.join(self.marks)}</g></svg>"
        )

    def _round(self, point: tuple[float, float], style: str, radius: float, said: str, more: str = "") -> None:
        x, y = self.place(*point)
        title = f"<title>{escape(said)}</title>" if said else ""
        self.marks.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" style="{style}"{more}>{title}</circle>')

    def _axes(self) -> str:
        right, parts = self.width - self.right, []
        for value, label in self.x.ticks:
            x, _ = self.place(value, self.y.low)
            parts.append(f'<path d="M{x:g} 0V{self.height:g}" style="stroke:var(--line)"/>')
            parts.append(_text(x, self.height + 18, label, "middle"))
        for value, label in self.y.ticks:
            _, y = self.place(self.x.low, value)
            parts.append(f'<path d="M{LEFT} {y:g}H{right:g}" style="stroke:var(--line)"/>')
            parts.append(_text(LEFT - 8, y + 4, label, "end"))
        parts.append(f'<path d="M{LEFT} 0V{self.height:g}H{right:g}" style="fill:none;stroke:var(--muted)"/>')
        parts.append(_text((LEFT + right) / 2, self.height + 38, self.x.label, "middle"))
        turned = f' transform="rotate(-90 12 {self.height / 2:g})"'
        parts.append(_text(12, self.height / 2, self.y.label, "middle", turned))
        return "".join(parts)

    def _legend(self) -> tuple[str, int]:
        """Its entries in lines, as many in each as there is room for; and how many lines."""
        parts, x, line = [], LEFT, 1 if self.entries else 0
        for drawn, label in self.entries:
            wide = 22 + round(CHARACTER * len(label)) + 16
            if x + wide > self.width and x > LEFT:
                x, line = LEFT, line + 1
            parts.append(
                f'<g transform="translate({x} {LEGEND_LINE * line - 4})">{drawn}{_text(22, 0, label, "start")}</g>'
            )
            x += wide
        return "".join(parts), line


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="fill:var(--soft)"{more}>{escape(text)}</text>'
