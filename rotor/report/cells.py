"""The map of ranks: a cell for each group of KV heads, with what is kept and of how many columns and bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..calibration.run import Run
from ..format.columns import Columns
from ..format.file_names import ROTOR_JSON
from ..format.layout import GroupLayout, LayoutDict
from ..search.point import Point

WHOLE_BITS = 16


@dataclass(frozen=True)
class CellSide:
    """Keys or values of a group: the columns that are kept, and where they are codes, how many of each width.

    widths: `28x16 76x8` are 28 columns of 16 bits and 76 of 8. bits: of all together; 0 where columns are numbers.
    """

    rank: int
    widths: str = ""
    bits: int = 0

    @classmethod
    def of(cls, rank: int, columns: Columns | None) -> CellSide:
        if columns is None:
            return cls(rank)
        counts = {int(width): count for width, count in columns.to_dict().items()}
        widths = " ".join(f"{count}x{width}" for width, count in counts.items())
        return cls(rank, widths, sum(width * count for width, count in counts.items()))


@dataclass(frozen=True)
class Cell:
    """One group: its KV heads, both sides, and the columns that each side has before any is dropped.

    joint: both sides are the same latent.
    """

    kv_heads: tuple[int, ...]
    keys: CellSide
    values: CellSide
    columns: int
    joint: bool

    @classmethod
    def of(cls, group: GroupLayout, head_dim: int) -> Cell:
        keys = CellSide.of(group.qk_rank, group.qk_columns)
        values = CellSide.of(group.v_rank, group.v_columns)
        columns = len(group.kv_heads) * head_dim * (2 if group.joint else 1)
        return cls(group.kv_heads, keys, values, columns, group.joint)

    def side(self, name: str) -> CellSide:
        """`keys` or `values`."""
        return self.keys if name == "keys" else self.values

    @property
    def whole_bits(self) -> int:
        """Of all columns at WHOLE_BITS each."""
        return self.columns * WHOLE_BITS


def cells_of_layouts(layouts: Sequence[LayoutDict], head_dim: int) -> list[list[Cell]]:
    """Of each layer of a checkpoint, in the order of its KV heads."""
    groups = [[GroupLayout.from_dict(group, ROTOR_JSON) for group in layout["groups"]] for layout in layouts]
    return [sorted((Cell.of(g, head_dim) for g in layer), key=lambda cell: cell.kv_heads) for layer in groups]


def cells_of_point(run: Run, point: Point) -> list[list[Cell]]:
    """Of each layer of a measured point."""
    cells = []
    for index, key in enumerate(point.choice):
        size = int(run.info["candidates"][key]["group_size"])
        heads = [tuple(range(i * size, (i + 1) * size)) for i in range(len(point.ranks[index]))]
        if point.columns is None:
            groups = [GroupLayout(h, qk, v) for h, (qk, v) in zip(heads, point.ranks[index], strict=True)]
        else:
            groups = [GroupLayout.coded(h, *pair) for h, pair in zip(heads, point.columns[index], strict=True)]
        cells.append([Cell.of(group, run.shape.head_dim) for group in groups])
    return cells
