"""The kernel_config.json of a model that nobody has tuned: tiles and warps by rule.

`rotor export` writes it, and checkpoints without the file run by it. The sizes take the fewest instructions a key
without spilling (`rotor compile`); no GPU has confirmed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rotor.checkpoint.kernel_config import ARCHITECTURES, KernelConfig, LayerKernels, Tile, layout_class
from rotor.checkpoint.layout import LayerLayout

MOST_REBUILT = 64
"""Fast planes of all KV heads of a group that a tile of decoding rebuilds; with more, keys are materialised."""

SLICES_PER_SM = 8
"""Decoding programs on an SM: as many as fit with one warp each and 255 registers a thread."""

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
    materialise = layout.fast_planes * layout.group_size > MOST_REBUILT
    return LayerKernels(layout_class(layout), sm_80, sm_90, max(1, SLICES_PER_SM // sm_90.warps), materialise)


def decode_tile(layout: LayerLayout, query_rows: int, capability: int = 90) -> Tile:
    """The tile with the fewest instructions in SASS for sm_80 and sm_90 that does not spill (heads of 128, bfloat16).

    64 keys and one warp up to 128 nibbles and 8 rows, without fast planes or with few of a narrow latent. Wider latents
    and more rows take two warps or more and tiles of 32 keys; four KV heads together take four warps. Where keys and
    values are two rows, each is unpacked behind shared memory, which takes fewer instructions and half of its bytes;
    one row for both would be unpacked twice.
    """
    rows = max(8, _power(query_rows))
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    width = layout.planes * max(16, _power(widest // layout.operands)) * (1 + layout.latents_per_group) / 2
    fast = max(16, _power(layout.fast_planes)) if layout.fast_planes else 0
    if not layout.coded:
        size = width * rows
        return Tile(64, 2, 2, packed=True) if size <= 1024 else Tile(32, 4 if size <= 8192 else 8, 2)
    if not fast:
        warps = _power(max(1, min(8, int(width * rows) // 2048)))
        return Tile(64, warps, 2, packed=not layout.joint and warps == 1)
    if width * rows <= 512 and fast <= 16:
        return Tile(64, 1, 2)
    if width * rows <= 1024 and fast <= 16:
        if layout.group_size == 1:
            return Tile(64, 2, 2)
        return Tile(64, 2, 2, lean=3, together=2) if capability >= 90 else Tile(64, 2, 1, lean=1)
    if layout.group_size == 4 and fast == 16 and (layout.rope_block or 0) >= 64 and width * rows <= 4096:
        if capability >= 90:  # the products of four KV heads together are those of a warp group
            return Tile(64, 4, 1, lean=1, together=4, again=2)
        return Tile(64, 4, 1, lean=3, again=1)
    return Tile(32, 2 if width * rows <= 4096 else 4, 1, lean=1)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
