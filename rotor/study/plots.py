"""What the plots of a study share: colours and lines. matplotlib is imported when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..installing import pip_install
from ..report.style import MARKERS

KL_LABEL = "KL divergence (nats per token)"
LEAST_KL = 1e-6
"""A smaller one is drawn at it: a logarithmic axis has no 0."""


def draw_line(axes: Any, index: int, points: Sequence[tuple[float, float]], label: str = "", **options: Any) -> None:
    """A line with marks, in the colour `index`; beyond ten the same colours come with other markers."""
    look = {"color": f"C{index % 10}", "marker": MARKERS[(index + index // 10) % len(MARKERS)], "markersize": 5}
    axes.plot([x for x, _ in points], [y for _, y in points], **{**look, "label": label, **options})


def draw_legend(axes: Any, **options: Any) -> None:
    """Inside the axes; the layout makes no room for it, however many entries it has."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.6, **options).set_in_layout(False)


def double_x(axes: Any) -> None:
    """Numbers from left to right in powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")


def require_matplotlib() -> None:
    """Raises UsageError, naming the command that installs it, if matplotlib is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib, which is not installed.",
            f"Run `{pip_install('plots')}`, or give --no-plots.",
        ) from error
