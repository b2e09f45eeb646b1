"""What the page of a report shows, as plain numbers and words."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..recipe import Recipe
from ..search.point import Point
from .cells import Cell

SIDES = ("qk", "vo")
JOINT = "joint"
"""What stands for both sides where keys and values share a latent."""


@dataclass(frozen=True)
class ShownPoint:
    """A measured point: stored compression, accuracy and 95 % interval on each split that it was measured on."""

    stored: float
    search: float | None
    search_interval: tuple[float, float] | None = None
    report: float | None = None
    interval: tuple[float, float] | None = None
    chosen: bool = False

    @classmethod
    def of(cls, point: Point, chosen: bool = False) -> ShownPoint:
        search, report = point.search, point.report
        return cls(
            point.stored,
            None if search is None else search.accuracy,
            None if search is None else search.interval,
            None if report is None else report.accuracy,
            None if report is None else report.interval,
            chosen,
        )


@dataclass(frozen=True)
class LayerLoss:
    """KL divergence in nats per token with one layer and side compressed: measured at the probe, predicted as chosen.

    Each is (keys, values); `predicted` is None where no ranks are chosen.
    """

    probed: tuple[float, float]
    predicted: tuple[float, float] | None


@dataclass
class ReportData:
    """Everything that the page shows.

    kind: `checkpoint` (a folder that export wrote) or `run` (one that calibrate wrote).
    headline: (label, value, note). spectra: per layer and side (or JOINT) singular values over the largest, averaged
    over the groups; spectra_of: by side, what those of a layer are of. ratios: (name, value or why there is none) of
    the point that is shown; ratios_of: the split that they are on. reached: what each target that was asked for led to.
    ranks: per layer its groups by KV heads. absent: section -> why there is nothing to show.
    """

    kind: str
    folder: str
    model: str
    recipe: Recipe
    facts: list[tuple[str, str]] = field(default_factory=list)
    headline: list[tuple[str, str, str]] = field(default_factory=list)
    spectra: list[dict[str, list[float]]] = field(default_factory=list)
    spectra_of: list[dict[str, str]] = field(default_factory=list)
    ranks: list[list[Cell]] = field(default_factory=list)
    ranks_of: str = ""
    points: list[ShownPoint] = field(default_factory=list)
    ratios: list[tuple[str, str]] = field(default_factory=list)
    ratios_of: str = "report"
    target: float | None = None
    metric: str = ""
    reached: list[tuple[str, ShownPoint | None]] = field(default_factory=list)
    losses: list[LayerLoss] = field(default_factory=list)
    token_pairs: list[tuple[str, ...]] = field(default_factory=list)
    token_counts: list[tuple[str, ...]] = field(default_factory=list)
    sizes: list[tuple[str, str, str]] = field(default_factory=list)
    timings: list[tuple[str, float, int]] = field(default_factory=list)
    next_steps: list[tuple[str, str]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def format_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
