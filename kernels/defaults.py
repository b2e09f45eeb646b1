"""The kernel_config.json of a model that nobody has tuned: tiles and warps by rule.

`rotor export` writes it, and checkpoints without the file run by it. Those for sm_90 were the fastest on an H100
(artifacts/benchmarks, docs/speed.md); those for sm_80 take the fewest instructions a key without spilling
(`rotor compile`), and no GPU has confirmed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rotor.checkpoint.kernel_config import ARCHITECTURES, KernelConfig, LayerKernels, Tile, layout_class
from rotor.checkpoint.layout import LayerLayout

MOST_REBUILT = 64
"""Fast planes of all KV heads of a group that a tile of decoding rebuilds; with more, keys are materialised."""

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
    materialise = layout.fast_planes * layout.group_size > MOST_REBUILT
    return LayerKernels(layout_class(layout), sm_80, sm_90, slices_per_sm(layout, sm_90), materialise)


def slices_per_sm(layout: LayerLayout, tile: Tile) -> int:
    """Programs an SM over which decoding splits its keys: twice as many of narrow latents as fit at a time, so that the
    last ones end together; half as many of wide ones, whose results are long to join."""
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    warps = WARPS_PER_SM
    if layout.coded:
        warps = 2 * WARPS_PER_SM if widest < 128 else WARPS_PER_SM if widest <= 256 else WARPS_PER_SM // 2
    return max(1, warps // tile.warps)


def decode_tile(layout: LayerLayout, query_rows: int, capability: int = 90) -> Tile:
    """The tile of decoding (heads of 128, bfloat16): for sm_90 the fastest on an H100 at 8 x 32768 keys, for sm_80 the
    one with the fewest instructions that does not spill.

    64 keys and one warp up to 128 nibbles and 8 rows, without fast planes or with few of a narrow latent. Wider latents
    and more rows take two warps or more and tiles of 32 keys; four KV heads together take four warps. On sm_90 tiles
    pass shared memory packed and are unpacked behind it, which moves a quarter of the bytes.
    """
    rows = max(8, _power(query_rows))
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    width = layout.planes * max(16, _power(widest // layout.operands)) * (1 + layout.latents_per_group) / 2
    fast = max(16, _power(layout.fast_planes)) if layout.fast_planes else 0
    work = int(width * rows)
    if not layout.coded:
        return Tile(64, 2, 2, packed=True) if work <= 1024 else Tile(32, 4 if work <= 8192 else 8, 2)
    return _hopper_tile(layout, work, fast) if capability >= 90 else _ampere_tile(layout, work, fast)


def _hopper_tile(layout: LayerLayout, work: int, fast: int) -> Tile:
    """work: nibbles of a latent times query rows. fast: fast planes, as they are padded."""
    if not fast:
        warps = _power(max(1, min(8, work // 2048)))
        if not layout.joint and warps == 1:
            return Tile(32, 1, 2, packed=True)
        return Tile(64, warps, 3 if work <= 512 else 2, packed=warps == 1)
    if fast <= 16 and work <= 512:
        return Tile(64, 1, 3, packed=True)
    if fast <= 16 and work <= 1024 and layout.group_size == 1:
        return Tile(64, 2, 3, packed=True)
    if fast <= 16 and work <= 1024:
        return Tile(64, 2, 2, lean=3, together=2, packed=True)
    if layout.group_size == 4 and fast == 16 and (layout.rope_block or 0) >= 64 and work <= 4096:
        return Tile(64, 4, 1, lean=1, together=4, packed=True)  # products of four KV heads are those of a warp group
    return Tile(32, 2 if work <= 4096 else 4, 2, lean=1)


def _ampere_tile(layout: LayerLayout, work: int, fast: int) -> Tile:
    """Arguments as in `_hopper_tile`."""
    if not fast:
        warps = _power(max(1, min(8, work // 2048)))
        return Tile(64, warps, 2, packed=not layout.joint and warps == 1)
    if work <= 512 and fast <= 16:
        return Tile(64, 1, 2)
    if work <= 1024 and fast <= 16:
        return Tile(64, 2, 2) if layout.group_size == 1 else Tile(64, 2, 1, lean=1)
    if layout.group_size == 4 and fast == 16 and (layout.rope_block or 0) >= 64 and work <= 4096:
        return Tile(64, 4, 1, lean=3, again=1)
    return Tile(32, 2 if work <= 4096 else 4, 1, lean=1)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
