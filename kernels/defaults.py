"""The kernel_config.json of a model that nobody has tuned: tiles and warps by rule.

`rotor export` writes it, and checkpoints without the file run by it. Tiles go by counts of instructions (`python
artifacts/gpu count`); `rotor tune OUT` measures more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rotor.checkpoint.kernel_config import ARCHITECTURES, KernelConfig, LayerKernels, Tile, layout_class
from rotor.checkpoint.layout import LayerLayout

WARPS_PER_SM = 8
"""Warps of decoding programs on an SM: as many as fit with 255 registers a thread."""

HEADS_PER_KV = 4
"""Query heads of a KV head that the rule assumes, as in an 8B."""


def default_config(layouts: Sequence[LayerLayout]) -> KernelConfig:
    """The kernel configuration of a model, by rule."""
    return KernelConfig(tuple(default_layer(layout) for layout in layouts))


def config_of(path: Path | None, layouts: Sequence[LayerLayout]) -> KernelConfig:
    """Read kernel_config.json, or without one go by the rule; raises CheckpointError if it does not fit the model."""
    if path is None:
        return default_config(layouts)
    config = KernelConfig.read(path)
    config.check(layouts, str(path))
    return config


@lru_cache(maxsize=4096)
def default_layer(layout: LayerLayout) -> LayerKernels:
    """The launches of a layer, by rule."""
    sm_80, sm_90 = (decode_tile(layout, layout.group_size * HEADS_PER_KV, of) for of in ARCHITECTURES)
    return LayerKernels(layout_class(layout), sm_80, sm_90, slices_per_sm(layout, sm_90), layout.pre_rope)


def slices_per_sm(layout: LayerLayout, tile: Tile) -> int:
    """Programs an SM over which decoding splits its keys: twice as many of narrow latents as fit at a time, so that the
    last ones end together; half as many of wide ones, whose results are long to join."""
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    warps = WARPS_PER_SM
    if layout.coded:
        warps = 2 * WARPS_PER_SM if widest < 128 else WARPS_PER_SM if widest <= 256 else WARPS_PER_SM // 2
    return max(1, warps // tile.warps)


def decode_tile(layout: LayerLayout, query_rows: int, capability: int = 90) -> Tile:
    """The tile of decoding: one warp takes 64 keys; two share them where rows are wide and query rows many.

    The rule is the same for all architectures.
    """
    rows = max(8, _power(query_rows))
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    work = widest // layout.operands * layout.planes * rows * (1 + layout.latents_per_group) // 2
    if not layout.coded:
        return Tile(64, 2, 2) if work <= 1024 else Tile(32, 4 if work <= 8192 else 8, 2)
    if work > 3072 or widest > 256:
        return Tile(64, 2, 2)
    return Tile(64, 1, 3) if layout.joint else Tile(32, 1, 2)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
