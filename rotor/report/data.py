"""What the page of a report shows, as plain numbers and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..calibration.run import Run
from ..evaluation.fidelity import Fidelity
from ..format.channels import Latent, Numbers
from ..format.layout import GroupLayout
from ..recipe import Recipe
from ..search.point import Point

SIDES = ("qk", "vo")
JOINT = "joint"
"""What stands for both sides where keys and values share a latent."""

WHOLE_BITS = 16


@dataclass(frozen=True)
class ShownPoint:
    """A measured point: stored compression, and accuracy on each split that it was measured on."""

    stored: float
    search: Fidelity | None = None
    report: Fidelity | None = None
    chosen: bool = False

    @classmethod
    def of(cls, point: Point, chosen: bool = False) -> ShownPoint:
        return cls(point.stored, point.search, point.report, chosen)


@dataclass(frozen=True)
class Cell:
    """The latents of one group of KV heads, in the map of ranks.

    channels: that each side has before any is dropped. values: None where both sides are the same latent.
    """

    kv_heads: tuple[int, ...]
    keys: Latent
    values: Latent | None
    channels: int

    @classmethod
    def of(cls, group: GroupLayout, head_dim: int) -> Cell:
        channels = len(group.kv_heads) * head_dim * (2 if group.joint else 1)
        return cls(group.kv_heads, group.key, group.value, channels)

    @property
    def joint(self) -> bool:
        return self.values is None

    def side(self, name: str) -> Latent:
        """`keys` or `values`."""
        return self.keys if name == "keys" or self.values is None else self.values

    def widths(self, name: str) -> str:
        """`28x8 76x4` are 28 channels of 8 bits and 76 of 4; nothing for channels that are numbers."""
        latent = self.side(name)
        if isinstance(latent, Numbers):
            return ""
        return " ".join(f"{count}x{width}" for width, count in latent.to_dict().items())

    def bits(self, name: str) -> int:
        """Of all channels that are kept."""
        latent = self.side(name)
        return WHOLE_BITS * latent.rank if isinstance(latent, Numbers) else sum(latent.bits)

    @property
    def whole_bits(self) -> int:
        """Of all channels at WHOLE_BITS each."""
        return self.channels * WHOLE_BITS


def cells_of_point(run: Run, point: Point) -> list[list[Cell]]:
    """Of each layer of a measured point."""
    cells = []
    for index, key in enumerate(point.choice):
        size, latents = run.candidates[key].group_size, _latents(point, index)
        groups = [GroupLayout(tuple(range(i * size, (i + 1) * size)), *pair) for i, pair in enumerate(latents)]
        cells.append([Cell.of(group, run.shape.head_dim) for group in groups])
    return cells


def _latents(point: Point, layer: int) -> Sequence[tuple[Latent, Latent | None]]:
    if point.channels:
        return point.channels[layer]
    return [(Numbers(qk), Numbers(v)) for qk, v in point.ranks[layer]]


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
    sizes: list[tuple[str, str, str]] = field(default_factory=list)
    timings: list[tuple[str, float, int]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def format_bytes(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} bytes"
    unit, size = next(((unit, size) for unit, size in (("kB", 1e3), ("MB", 1e6)) if count < 1000 * size), ("GB", 1e9))
    return f"{count / size:.1f} {unit}"
