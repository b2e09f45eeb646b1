"""The style of plots in reports and studies, axes of accuracy and compression, colours of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "svg.hashsalt": "rotor",
}

MARKERS = "osD^vPX*<>"
"""Markers of the lines of a plot, in turn."""

LOSS_FLOOR = 5e-4
"""Least loss of accuracy that is drawn; smaller ones and 0 are drawn there, as a logarithmic axis has no 0."""

LOSS_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


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
