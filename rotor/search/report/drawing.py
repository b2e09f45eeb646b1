"""Charts as SVG text: axes, and marks placed by the values that they stand for.

Colours are CSS (`var(--keys)`), so that a chart follows its page, light or dark. The same data gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT_SIZE = 12
CHARACTER = 0.56 * FONT_SIZE
"""About the width of a character, by which labels get room."""

LEFT, RIGHT, BOTTOM = 64, 12, 44
LEGEND_LINE = 18


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

    def __init__(self, x: Axis, y: Axis, width: float = 440, height: float = 280, right: float = RIGHT) -> None:
        """height: of the plot alone. right: room beside it."""
        self.x, self.y = x, y
        self.width, self.height, self.right = width, height, right
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

    def ring(self, point: tuple[float, float], colour: str, *, radius: float = 9) -> None:
        """Draw a ring around a point."""
        self._round(point, f"fill:none;stroke:{colour}", radius, "", ' stroke-width="2"')

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

    def colour_scale(self, colours: Sequence[str], label: str, least_steps: int = 4) -> None:
        """Draw a scale of colours, the first at the bottom, in the room to the right of the plot, with numbers."""
        left, step = self.width - self.right + 10, self.height / len(colours)
        for index, colour in enumerate(colours):
            top = self.height - (index + 1) * step
            self.marks.append(
                f'<rect x="{left:g}" y="{top:.1f}" width="10" height="{step + 0.3:.1f}" style="fill:{colour}"/>'
            )
        every = max(1, len(colours) // least_steps)
        for index in range(0, len(colours), every):
            self.marks.append(_text(left + 14, self.height - (index + 0.5) * step + 4, str(index), "start"))
        self.marks.append(_text(left, self.height + 18, label, "start"))

    def svg(self, described: str, style: str = "") -> str:
        """The chart.

        Args:
            described: for those who do not see it. style: CSS of its own, where no page around it has any.
        """
        legend, lines = self._legend()
        top = LEGEND_LINE * lines + 10
        whole = f"0 0 {self.width:g} {top + self.height + BOTTOM:g}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{whole}" role="img" aria-label="{escape(described)}" '
            f'font-size="{FONT_SIZE}">{style}{legend}<g transform="translate(0 {top:g})">'
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
