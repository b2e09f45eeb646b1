"""What the plots of reports and studies share: an axis for accuracies near 1, and colours for any number of layers."""

from __future__ import annotations

from typing import Any

LOSS_FLOOR = 5e-4
"""Losses of accuracy below it, none among them, are drawn at it: a logarithmic axis has no 0."""

LOSS_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
COMPRESSION_TICKS = (0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99)
KEPT_FLOOR = 1e-3
"""Smallest share of the cache that an axis of compression shows."""

SCALE = ("#3b6fd4", "#1f9e94", "#c9742a")
"""Colours of the first, a middle and the last layer; each is readable on a light and on a dark page."""

MOST_STEPS = 40
"""Of a colour scale."""


def shown_loss(accuracy: float) -> float:
    """Where an accuracy lies on `accuracy_axis`."""
    return min(max(1 - accuracy, LOSS_FLOOR), 1.0)


def accuracy_axis(axes: Any, losses: list[float], label: str) -> None:
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


def compression_axis(axes: Any, most: float, label: str) -> None:
    """An axis of compression from 0, logarithmic in what is kept: from 0.9 to 0.95 it is as far as from 0 to 0.5.

    Args:
        most: the largest that is drawn.
    """
    least_kept = max(0.8 * (1 - most), KEPT_FLOOR)
    axes.set_xscale("function", functions=(_halvings, lambda halvings: 1 - 0.5**halvings))
    axes.set_xlim(-0.03, 1 - least_kept)
    axes.set_xticks([tick for tick in COMPRESSION_TICKS if tick <= 1 - least_kept])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(label)


def _halvings(compression: Any) -> Any:
    import numpy as np

    return -np.log2(np.maximum(1 - np.asarray(compression, dtype=float), KEPT_FLOOR))


def layer_colours(layers: int) -> list[str]:
    """A colour for each layer, from SCALE."""
    return [_between(index / max(layers - 1, 1)) for index in range(layers)]


def layer_legend(figure: Any, axes: Any, layers: int) -> None:
    """A scale of `layer_colours` beside axes, with numbers of layers; nothing for one layer."""
    if layers < 2:
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    steps = min(layers, MOST_STEPS)
    edges = [-0.5 + layers * step / steps for step in range(steps + 1)]
    colours = ListedColormap([_between(step / (steps - 1)) for step in range(steps)])
    bar = figure.colorbar(ScalarMappable(BoundaryNorm(edges, steps), colours), ax=axes, pad=0.02, aspect=30)
    every = max(1, -(-(layers - 1) // 8))
    numbers = list(range(0, layers, every))
    if layers - 1 - numbers[-1] < every / 2:
        numbers.pop()
    bar.set_ticks([*numbers, layers - 1])
    bar.ax.minorticks_off()
    bar.ax.tick_params(length=0, labelsize=8)
    bar.set_label("layer", fontsize=8)  # not above, where the title of the axes is
    bar.outline.set_visible(False)


def _between(share: float) -> str:
    """The colour at a share of SCALE, linear between its colours."""
    place = share * (len(SCALE) - 1)
    start = min(int(place), len(SCALE) - 2)
    parts = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in SCALE[start : start + 2]]
    mixed = (round(a + (place - start) * (b - a)) for a, b in zip(*parts, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
