"""kernel_config.json: how the kernels are to run a compressed model, decided when it is exported and free to edit.

Pure data: the values that a launch goes by. The rules that choose them are in `kernels/defaults.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from ..typed import Reader
from .columns import Columns
from .file_names import KERNEL_CONFIG
from .json_files import read_json
from .layout import LayerLayout

VERSION = 2

Schedule = Literal["stream", "lpt", "none"]
"""Of decoding; `kernels/decode.py` says what each is."""

SMALLEST_BLOCK, LARGEST_ROW_BLOCK = 16, 1 << 16
COLUMN_BLOCKS = (16, 32, 64)
TILES = (16, 32, 64, 128)
DEFAULT_SLICES, MOST_SLICES = 2, 16
REBUILT_STEP = 16
SLOW_BLOCKS = (128, 256, 512)
MOST_NODES = 8
EDITED = "Undo the edit, or remove the file: without it the kernels go by their own rules."


_Group = tuple[int, int, tuple[int, ...] | None, tuple[int, ...] | None]
"""Ranks and columns by bits of a group's keys and values."""


@dataclass(frozen=True)
class Blocks:
    """Query rows and keys of a prefill's tile (B_r and B_c); fewer where registers or shared memory hold no more."""

    rows: int
    columns: int


@dataclass(frozen=True)
class ClassKernels:
    """One prefill launch of a layer: so many consecutive groups, all of these ranks, and of equal columns by bits.

    rebuilt: domain `pre`: the blocks where keys were rebuilt in memory first.
    qk_columns, v_columns: of rows of codes: columns at 16, 8, 4 and 2 bits.
    """

    groups: int
    qk_rank: int
    v_rank: int
    blocks: Blocks
    rebuilt: Blocks | None = None
    qk_columns: tuple[int, ...] | None = None
    v_columns: tuple[int, ...] | None = None

    @property
    def group(self) -> _Group:
        """Each of its groups."""
        return self.qk_rank, self.v_rank, self.qk_columns, self.v_columns


@dataclass(frozen=True)
class SlowPlanes:
    """Domain `pre`: the rotary planes of a head that decoding does not rebuild for every key.

    rebuilt: planes that it does, the fastest ones. block: keys over which the turns of the others are interpolated.
    nodes: places in a block that they are interpolated from.
    """

    rebuilt: int
    block: int
    nodes: int


@dataclass(frozen=True)
class LayerKernels:
    """The launches of a layer.

    classes: of the prefill, in the order of the layout's groups.
    specialisations: (qk_rank, v_rank) that the kernels of decoding and of few queries are compiled for; the narrowest
        that is wide enough serves a group.
    tile: keys of a tile in decoding, of 16-bit numbers; fewer where registers or shared memory hold no more.
    slices_per_sm: programs an SM over which a prefill of few queries splits their keys, where the row blocks of a class
        are on the average at most half as many; 0 for never.
    slow_planes: domain `pre`: what decoding interpolates; None to rebuild whole keys, and where keys are turned within
        blocks of positions.
    """

    classes: tuple[ClassKernels, ...]
    specialisations: tuple[tuple[int, int], ...]
    tile: int
    slices_per_sm: int = DEFAULT_SLICES
    slow_planes: SlowPlanes | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.classes, self.specialisations, self.tile, self.slices_per_sm, self.slow_planes))

    def __hash__(self) -> int:
        """Computed once: every launch looks the layer up in caches."""
        return self._hash

    @property
    def groups(self) -> list[_Group]:
        """Those that the classes describe."""
        return [c.group for c in self.classes for _ in range(c.groups)]


@dataclass(frozen=True)
class KernelConfig:
    """The kernels of a model: the schedule of decoding, and the launches of each layer.

    cache: the policy by which the cache is kept, as config.json has it; the kernels do not serve one that evicts.
    """

    schedule: Schedule
    layers: tuple[LayerKernels, ...]
    cache: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads, in JSON's types."""
        layers = []
        for layer in self.layers:
            classes = [
                {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(c).items() if v is not None}
                for c in layer.classes
            ]
            pairs = [list(pair) for pair in layer.specialisations]
            numbers = {"tile": layer.tile, "slices_per_sm": layer.slices_per_sm}
            slow = {} if layer.slow_planes is None else {"slow_planes": asdict(layer.slow_planes)}
            layers.append({"classes": classes, "specialisations": pairs, **numbers, **slow})
        cache = {} if self.cache is None else {"cache": self.cache}
        return {"version": VERSION, "schedule": self.schedule, "layers": layers, **cache}

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = KERNEL_CONFIG) -> KernelConfig:
        """Read what `to_dict` wrote.

        Raises:
            CheckpointError: another version, a field that is missing, unknown or of no sensible value; names `where`.
        """
        reader = Reader(where, CheckpointError, EDITED)
        if data.get("version") != VERSION:
            raise CheckpointError(
                f"{where}: version {data.get('version')!r}, this rotor reads {VERSION}.",
                "Export the checkpoint again, or remove the file: without it the kernels go by their own rules.",
            )
        config: KernelConfig = reader.read(cls, {key: value for key, value in data.items() if key != "version"})
        layers = []
        for index, layer in enumerate(config.layers):
            _check_values(layer, f"layers[{index}]", reader)
            # A pair in JSON is a list.
            pairs = tuple((qk_rank, v_rank) for qk_rank, v_rank in layer.specialisations)
            layers.append(replace(layer, specialisations=pairs))
        return cls(config.schedule, tuple(layers), config.cache)

    @classmethod
    def read(cls, path: Path) -> KernelConfig:
        """Read a file; raises CheckpointError as `from_dict` does, or where it is no JSON."""
        return cls.from_dict(read_json(path, EDITED), str(path))

    def describes(self, layouts: list[LayerLayout]) -> bool:
        """Whether the classes are those of a model with these layouts, by their ranks and columns."""
        return [layer.groups for layer in self.layers] == [_groups(layout) for layout in layouts]

    def check(self, layouts: list[LayerLayout], where: str = KERNEL_CONFIG) -> None:
        """Raises CheckpointError, naming the field, where a model with these layouts cannot be run so."""
        reader = Reader(where, CheckpointError, EDITED)
        if len(self.layers) != len(layouts):
            raise reader.fail("layers", f"{len(self.layers)} layers", f"{len(layouts)}, as in config.json")
        for index, (layer, layout) in enumerate(zip(self.layers, layouts, strict=True)):
            name, groups = f"layers[{index}]", _groups(layout)
            ranks, got = ([group[:2] for group in of] for of in (groups, layer.groups))
            if got != ranks:
                raise reader.fail(f"{name}.classes", got, f"the ranks of the groups in config.json, {ranks}")
            if layer.groups != groups:
                columns, got_columns = ([group[2:] for group in of] for of in (groups, layer.groups))
                expected = f"the columns of the groups in config.json, by bits, {columns}"
                raise reader.fail(f"{name}.classes", got_columns, expected)
            for number, cls in enumerate(layer.classes):
                if (cls.rebuilt is None) == (layout.domain == "pre"):
                    expected = "blocks in domain pre, and none in others"
                    raise reader.fail(f"{name}.classes[{number}].rebuilt", cls.rebuilt, expected)
            if layer.slow_planes is not None and (layout.domain != "pre" or layout.turned_in_blocks):
                expected = "none in other domains than pre"
                if layout.turned_in_blocks:
                    expected = f"none, as keys are turned within blocks of {layout.rope_block} and no plane is rebuilt"
                raise reader.fail(f"{name}.slow_planes", asdict(layer.slow_planes), expected)
            _check_specialisations(layer, name, ranks, reader)


def serving(specialisations: tuple[tuple[int, int], ...], qk_rank: int, v_rank: int) -> tuple[int, int] | None:
    """The narrowest of the specialisations that is wide enough for a group; None if none is."""
    wide = [(qk, v) for qk, v in specialisations if qk >= qk_rank and v >= v_rank]
    return min(wide) if wide else None


def _groups(layout: LayerLayout) -> list[_Group]:
    return [(g.qk_rank, g.v_rank, _counts(g.qk_columns), _counts(g.v_columns)) for g in layout.groups]


def _counts(columns: Columns | None) -> tuple[int, ...] | None:
    return None if columns is None else columns.counts


def _check_values(layer: LayerKernels, name: str, reader: Reader) -> None:
    """What can be said of a layer without its layout."""
    if layer.tile not in TILES:
        raise reader.fail(f"{name}.tile", layer.tile, f"one of {', '.join(map(str, TILES))}")
    if not 0 <= layer.slices_per_sm <= MOST_SLICES:
        raise reader.fail(f"{name}.slices_per_sm", layer.slices_per_sm, f"a number from 0 to {MOST_SLICES}")
    if layer.slow_planes is not None:
        _check_slow_planes(layer.slow_planes, f"{name}.slow_planes", reader)
    for number, cls in enumerate(layer.classes):
        place = f"{name}.classes[{number}]"
        if cls.groups < 1 or cls.groups > 1 << 16:
            raise reader.fail(f"{place}.groups", cls.groups, "a positive number of groups")
        for kind, blocks in (("blocks", cls.blocks), ("rebuilt", cls.rebuilt)):
            if blocks is None:
                continue
            if blocks.rows % SMALLEST_BLOCK or not SMALLEST_BLOCK <= blocks.rows <= LARGEST_ROW_BLOCK:
                expected = f"a multiple of {SMALLEST_BLOCK} up to {LARGEST_ROW_BLOCK}"
                raise reader.fail(f"{place}.{kind}.rows", blocks.rows, expected)
            if blocks.columns not in COLUMN_BLOCKS:
                expected = f"one of {', '.join(map(str, COLUMN_BLOCKS))}"
                raise reader.fail(f"{place}.{kind}.columns", blocks.columns, expected)


def _check_slow_planes(slow: SlowPlanes, name: str, reader: Reader) -> None:
    if slow.rebuilt < REBUILT_STEP or slow.rebuilt % REBUILT_STEP or slow.rebuilt > 1 << 12:
        raise reader.fail(f"{name}.rebuilt", slow.rebuilt, f"a multiple of {REBUILT_STEP}")
    if slow.block not in SLOW_BLOCKS:
        raise reader.fail(f"{name}.block", slow.block, f"one of {', '.join(map(str, SLOW_BLOCKS))}")
    if not 1 <= slow.nodes <= MOST_NODES:
        raise reader.fail(f"{name}.nodes", slow.nodes, f"a number from 1 to {MOST_NODES}")


def _check_specialisations(layer: LayerKernels, name: str, ranks: list[tuple[int, int]], reader: Reader) -> None:
    """Powers of two, each serving a group, and one for every group."""
    used = set()
    for qk_rank, v_rank in ranks:
        found = serving(layer.specialisations, qk_rank, v_rank)
        if found is None:
            expected = f"one that is as wide as a group of {qk_rank} + {v_rank}"
            raise reader.fail(f"{name}.specialisations", layer.specialisations, expected)
        used.add(found)
    for number, pair in enumerate(layer.specialisations):
        # No wider than the next power of two of what a layer has, or a small edit could ask for gigabytes.
        most = [max(16, 1 << (max(group[side] for group in ranks) - 1).bit_length()) for side in (0, 1)]
        if not all(16 <= width <= limit and not width & (width - 1) for width, limit in zip(pair, most, strict=True)):
            expected = f"powers of two from 16 to {most[0]} and {most[1]}"
            raise reader.fail(f"{name}.specialisations[{number}]", pair, expected)
        if pair not in used:
            raise reader.fail(f"{name}.specialisations[{number}]", pair, "one that serves a group; this serves none")
