"""The content of a report's page, as plain numbers and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...calibration.run import Run
from ...checkpoint.layout import GroupLayout
from ...checkpoint.rows import WIDTHS, NumberRow, Row
from ...checkpoint.schemas import TextInfo
from ...recipe.recipe import Recipe
from ..point import Point

WHOLE_BITS = 16


@dataclass(frozen=True)
class Cell:
    """A latent in the map of ranks: channels that are kept of those that there are, and their bits of those at 16.

    widths: `28x8 76x4` are 28 channels of 8 bits and 76 of 4; nothing for channels that are numbers.
    """

    kv_heads: tuple[int, ...]
    rank: int
    channels: int
    bits: int
    whole_bits: int
    widths: str = ""

    @classmethod
    def of(cls, group: GroupLayout, side: str, head_dim: int) -> Cell:
        """side: `keys`, which stands for the latents of a joint group too, or `values`."""
        latent = group.key if side == "keys" else group.values
        channels = group.columns(head_dim)
        bits, widths = WHOLE_BITS * latent.rank, ""
        if not isinstance(latent, NumberRow):
            bits = sum(latent.bits)
            counts = {width: latent.bits.count(width) for width in WIDTHS}
            widths = " ".join(f"{count}x{width}" for width, count in counts.items() if count)
        return cls(group.kv_heads, latent.rank, channels, bits, WHOLE_BITS * channels, widths)


def groups_of_point(run: Run, point: Point) -> list[list[GroupLayout]]:
    """The groups of each layer of a measured point."""
    layers = []
    size = run.form.group_size
    for index in range(len(point.ranks)):
        pairs: Sequence[tuple[Row, ...]] = [(NumberRow(qk), NumberRow(v)) for qk, v in point.ranks[index]]
        if point.channels:
            pairs = point.channels[index]
        heads = [tuple(range(i * size, (i + 1) * size)) for i in range(len(pairs))]
        layers.append([GroupLayout(own, *pair) for own, pair in zip(heads, pairs, strict=True)])
    return layers


@dataclass
class ReportData:
    """Everything that the page shows.

    kind: `checkpoint` (a folder that export wrote) or `run` (one that calibrate wrote).
    headline: (label, value, note). spectra: per layer and latent singular values over the largest, averaged over the
    groups; spectra_of: by latent, what they are of. ratios: (name, value or why there is none) of
    the point that is shown; ratios_of: the split that they are on.
    ranks: per layer its groups by KV heads, of latents of `head_dims` channels a head. chosen: of points, that which is
    shown. absent: section -> why there is nothing to show.
    """

    kind: str
    folder: str
    model: str
    recipe: Recipe
    facts: list[tuple[str, str]] = field(default_factory=list)
    headline: list[tuple[str, str, str]] = field(default_factory=list)
    spectra: list[dict[str, list[float]]] = field(default_factory=list)
    spectra_of: dict[str, str] = field(default_factory=dict)
    ranks: list[list[GroupLayout]] = field(default_factory=list)
    head_dims: list[int] = field(default_factory=list)
    ranks_of: str = ""
    points: list[Point] = field(default_factory=list)
    chosen: Point | None = None
    ratios: list[tuple[str, str]] = field(default_factory=list)
    ratios_of: str = "report"
    target: float | None = None
    metric: str = ""
    sizes: list[tuple[str, str, str]] = field(default_factory=list)
    timings: list[tuple[str, float, int]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    texts: list[TextInfo] = field(default_factory=list)
