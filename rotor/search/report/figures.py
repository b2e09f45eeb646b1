"""Figures of a report: accuracy against compression, what each layer keeps, and singular values.

They are narrow, so that text stays readable at the width of a phone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...checkpoint.layout import GroupLayout
from ...checkpoint.rows import WIDTHS, NumberRow, Row
from ..evaluation.accuracy import Fidelity
from .data import WHOLE_BITS, Cell, ReportData
from .drawing import Axis, Chart

SIDE_NAMES = {"qk": "keys", "vo": "values", "joint": "keys and values"}

SPLIT_COLOURS = {"search": "var(--muted)", "report": "var(--keys)"}

FLOOR = 1e-6
"""Smallest share that a logarithmic axis of a spectrum shows."""

LOSS_FLOOR = 5e-4
"""Least loss of accuracy that is drawn; smaller ones and 0 are drawn there, as a logarithmic axis has no 0."""

LOSS_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

LINE_POINTS = 100
"""Points of a drawn line at most."""


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
        if any(split == own for own, _, _ in measured):
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
    found: Fidelity | None = shown.report or shown.search
    assert found is not None
    chart.ring((shown.stored, shown_loss(found.accuracy)), "var(--accent)")
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
    found: dict[tuple[str, int | None], int] = {}
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
                found[side, width] = found.get((side, width), 0) + bits
    return sorted(((*part, bits) for part, bits in found.items() if bits), key=lambda part: _order(part[:2]))


def _order(part: tuple[str, int | None]) -> tuple[int, int]:
    """Where a part stands in its bar: keys before values, and the most bits first."""
    side, width = part
    return list(SIDE_NAMES).index(side), -(width or WHOLE_BITS)


def _kept(groups: Sequence[GroupLayout], head_dim: int) -> str:
    """What each latent of a layer keeps, in words."""
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
