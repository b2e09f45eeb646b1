"""The plots of a study: colours, lines and files. matplotlib is imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...installing import pip_install
from ...search.report.figures import MARKERS, STYLE
from .part import Part
from .store import StudyStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
