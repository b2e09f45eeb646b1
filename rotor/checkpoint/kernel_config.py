"""kernel_config.json: how the kernels are to run a compressed model, decided when it is exported and free to edit.

Pure data: the values that a launch goes by. The rules that choose them without a GPU are in `kernels/dispatch.py`;
`rotor tune OUT` writes what it measured. No schedule is named: decoding takes equal slices of all keys, and the
papers' longest task first (FDC and ZACK 5.3) is simulated alone, by artifacts/studies/schedules.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..checked import JsonObject, OneOf, Reader
from ..errors import CheckpointError
from .files import KERNEL_CONFIG, read_json
from .layout import LayerLayout

ARCHITECTURES = (80, 90)
"""Compute capabilities that a file has tiles for; a GPU takes those of the last that is not above its own."""

EDITED = "Export it again, or remove the file: without it the kernels go by their own rules."


@dataclass(frozen=True)
class Tile:
    """Sizes of a decoding program.

    keys: of a tile, at most a block of positions. warps: of a program. stages: of its copies.
    """

    keys: Annotated[int, OneOf((16, 32, 64, 128))]
    warps: Annotated[int, OneOf((1, 2, 4, 8))] = 1
    stages: Annotated[int, Field(ge=1, le=6)] = 2


@dataclass(frozen=True)
class LayerKernels:
    """Launch parameters of the kernels of a layer.

    layout: the layer's layout in words (`layout_class`), which must be that of config.json.
    sm_80, sm_90: tiles of decoding by architecture.
    slices_per_sm: programs an SM over which decoding splits its keys.
    materialise: whether decoding rebuilds keys in memory and calls stock attention, as prompts do.
    """

    layout: str
    sm_80: Tile
    sm_90: Tile
    slices_per_sm: Annotated[int, Field(ge=1, le=64)]
    materialise: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.sm_80, self.sm_90, self.slices_per_sm, self.materialise))

    def __hash__(self) -> int:
        """Computed once: every launch looks the layer up in caches."""
        return self._hash

    def tile(self, capability: int) -> Tile:
        """The tile for a GPU of a compute capability (90 is 9.0)."""
        return self.sm_90 if capability >= 90 else self.sm_80


@dataclass(frozen=True)
class KernelConfig:
    """The kernels of a model, layer by layer. version: of the file format; other versions are refused."""

    layers: tuple[LayerKernels, ...]
    version: Literal[4] = 4

    def to_dict(self) -> JsonObject:
        """Write what `from_dict` reads, in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: JsonObject, where: str = KERNEL_CONFIG) -> KernelConfig:
        """Read what `to_dict` wrote.

        Raises:
            CheckpointError: another version, a field that is missing, unknown or of no sensible value; names `where`.
        """
        config: KernelConfig = Reader(where, CheckpointError, EDITED).read(cls, data)
        return config

    @classmethod
    def read(cls, path: Path) -> KernelConfig:
        """Read a file; raises CheckpointError as `from_dict` does, or where it is no JSON."""
        return cls.from_dict(read_json(path, EDITED), str(path))

    def check(self, layouts: Sequence[LayerLayout], where: str = KERNEL_CONFIG) -> None:
        """Check that the file belongs to a model with these layouts; raises CheckpointError, which names the field.

        Any tile runs: one that is larger than a GPU's memory is halved when it is launched.
        """
        reader = Reader(where, CheckpointError, EDITED)
        if len(self.layers) != len(layouts):
            raise reader.fail("layers", f"{len(self.layers)} layers", f"{len(layouts)}, as in config.json")
        for index, (layer, layout) in enumerate(zip(self.layers, layouts, strict=True)):
            if layer.layout != layout_class(layout):
                expected = f"the layer of config.json, {layout_class(layout)!r}"
                raise reader.fail(f"layers[{index}].layout", layer.layout, expected)


def layout_class(layout: LayerLayout) -> str:
    """Case that the kernels of a layer are compiled for, in words: `joint 256x2, T 64`.

    Nibbles (or numbers) of the rows of the classes of groups with their KV heads, the block within which keys are
    rotated, lanes of nibbles whose crumbs are read too; `apart` where values have latents of their own, `numbers` where
    there are no codes.
    """
    nibbles = layout.word_nibbles
    widths = []
    for cls in layout.classes():
        sides = "+".join(str(side.width // layout.operands * nibbles) for side in layout.groups[cls.start].latents)
        widths.append(f"{sides}x{layout.group_size}" + (f" ({cls.count})" if cls.count < len(layout.groups) else ""))
    form = "" if layout.rope_block is None else f", T {layout.rope_block}"
    split = f", split {layout.operands - nibbles}" if layout.operands > nibbles else ""
    return f"{layout.kind} {', '.join(widths)}{form}{split}"
