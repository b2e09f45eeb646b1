"""The plots of a study: colours, lines and files. matplotlib is imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...search.report.figures import LOSS_FLOOR, LOSS_TICKS
from ...versions import pip_install
from .part import Part
from .store import StudyStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "svg.hashsalt": "rotor",
}
"""Style of plots; the same data gives the same bytes."""

MARKERS = "osD^vPX*<>"
"""Markers of the lines of a plot, in turn."""

KL_LABEL = "KL divergence (nats per token)"
LEAST_KL = 1e-6
"""Least KL that is drawn; smaller ones are drawn there, as a logarithmic axis has no 0."""


def write_plots(store: StudyStore, parts: Sequence[Part]) -> list[Path]:
    """Draw what the store has records for, as PNG and SVG; returns the files. matplotlib must be there."""
    import matplotlib
    from matplotlib.figure import Figure

    files: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for name, draw in (item for part in parts for item in part.plots(store).items()):
            figure = Figure(figsize=(11, 4.5), dpi=120)
            draw(figure)
            figure.suptitle(f"{store.settings['model']['name']}: {figure.get_suptitle()}")
            stem = store.folder / "plots" / name
            stem.parent.mkdir(exist_ok=True)
            files += [stem.with_suffix(".png"), stem.with_suffix(".svg")]
            figure.savefig(files[-2])
            figure.savefig(files[-1], metadata={"Date": None})
    return files


def draw_line(axes: Axes, index: int, points: Sequence[tuple[float, float]], label: str = "", **options: Any) -> None:
    """Draw a line with marks, in the colour `index`; beyond ten the same colours come with other markers."""
    look = {"color": f"C{index % 10}", "marker": MARKERS[(index + index // 10) % len(MARKERS)], "markersize": 5}
    axes.plot([x for x, _ in points], [y for _, y in points], **{**look, "label": label, **options})


def accuracy_axis(axes: Axes, worst: float) -> None:
    """Make the vertical axis one of accuracy as in a report: best at the top, logarithmic in what is lost.

    Args:
        worst: the largest loss (`shown_loss`) that is drawn.
    """
    worst = max(worst, 0.01)
    axes.set_yscale("log")
    axes.set_ylim(min(1.3 * worst, 1.1), 0.8 * LOSS_FLOOR)
    ticks = [tick for tick in LOSS_TICKS if tick <= 1.3 * worst]
    axes.set_yticks([LOSS_FLOOR, *ticks], [f"≥ {1 - LOSS_FLOOR:g}", *(f"{1 - tick:g}" for tick in ticks)])
    axes.set_yticks([], minor=True)
    axes.set_ylabel("accuracy (ratio to the model)")


def draw_legend(axes: Axes, **options: Any) -> None:
    """Draw a legend inside the axes; the layout makes no room for it, however many entries it has."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.6, **options).set_in_layout(False)


def require_matplotlib() -> None:
    """Raises UsageError, naming the command that installs it, if matplotlib is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib, which is not installed.",
            f"Run `{pip_install('plots')}`, or give --no-plots.",
        ) from error
