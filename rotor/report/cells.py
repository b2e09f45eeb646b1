"""The map of ranks: a cell for each group of KV heads, with what is kept and of how many channels and bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..calibration.run import Run
from ..format.channels import Latent, Numbers
from ..format.file_names import ROTOR_JSON
from ..format.layout import GroupLayout, LayerLayout
from ..search.point import Point

WHOLE_BITS = 16


@dataclass(frozen=True)
class CellSide:
    """Keys or values of a group: the channels that are kept, and where they are codes, how many of each width.

    widths: `28x8 76x4` are 28 channels of 8 bits and 76 of 4. bits: of all together; 0 of numbers.
    """

    rank: int
    widths: str = ""
    bits: int = 0

    @classmethod
    def of(cls, latent: Latent) -> CellSide:
        if isinstance(latent, Numbers):
            return cls(latent.rank)
        widths = " ".join(f"{count}x{width}" for width, count in latent.to_dict().items())
        return cls(latent.rank, widths, sum(latent.bits))


@dataclass(frozen=True)
class Cell:
    """One group: its KV heads, both sides, and the channels that each side has before any is dropped.

    joint: both sides are the same latent.
    """

    kv_heads: tuple[int, ...]
    keys: CellSide
    values: CellSide
    channels: int
    joint: bool

    @classmethod
    def of(cls, group: GroupLayout, head_dim: int) -> Cell:
        channels = len(group.kv_heads) * head_dim * (2 if group.joint else 1)
        return cls(group.kv_heads, CellSide.of(group.key), CellSide.of(group.values), channels, group.joint)

    def side(self, name: str) -> CellSide:
        """`keys` or `values`."""
        return self.keys if name == "keys" else self.values

    @property
    def whole_bits(self) -> int:
        """Of all channels at WHOLE_BITS each."""
        return self.channels * WHOLE_BITS


def cells_of_layouts(layouts: Sequence[dict[str, Any]], head_dim: int) -> list[list[Cell]]:
    """Of each layer of a checkpoint, in the order of its KV heads."""
    groups = [LayerLayout.from_dict(layout, ROTOR_JSON).groups for layout in layouts]
    return [sorted((Cell.of(g, head_dim) for g in layer), key=lambda cell: cell.kv_heads) for layer in groups]


def cells_of_point(run: Run, point: Point) -> list[list[Cell]]:
    """Of each layer of a measured point."""
    cells = []
    for index, key in enumerate(point.choice):
        candidate = run.candidates[key]
        latents: Sequence[tuple[Latent, Latent | None]] = (
            point.channels[index]
            if point.channels
            else [(Numbers(qk), None if candidate.joint else Numbers(v)) for qk, v in point.ranks[index]]
        )
        size = candidate.group_size
        heads = (tuple(range(i * size, (i + 1) * size)) for i in range(len(latents)))
        groups = [GroupLayout(own, *pair) for own, pair in zip(heads, latents, strict=True)]
        cells.append([Cell.of(group, run.shape.head_dim) for group in groups])
    return cells
