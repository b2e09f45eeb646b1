"""What kernel_config.json says of a model that nobody has tuned: tiles and warps by rule.

`rotor export` writes it, and checkpoints without the file are run by it. The sizes are those that take the fewest
instructions a key without spilling (`rotor compile`); no GPU has confirmed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rotor.format.kernel_config import KernelConfig, LayerKernels, Tile, layout_class
from rotor.format.layout import LayerLayout

MOST_REBUILT = 64
"""Fast planes of all KV heads of a group that a tile of decoding rebuilds; with more, keys are materialised."""

SLICES_PER_SM = 8
"""Programs of one warp that decoding gives an SM, so that copies of some hide behind products of others."""


def default_config(layouts: Sequence[LayerLayout]) -> KernelConfig:
    """The kernel configuration of a model, by rule."""
    return KernelConfig(tuple(default_layer(layout) for layout in layouts))


@lru_cache(maxsize=4096)
def default_layer(layout: LayerLayout) -> LayerKernels:
    """The launches of a layer: the wider its latents, and the more planes are rebuilt, the smaller the tile."""
    width = max(max(group.key.width, group.values.width) for group in layout.groups)
    rebuilt = layout.fast_planes * layout.group_size
    bytes_of_key = width // 2 if layout.coded else 2 * width
    keys = 64 if bytes_of_key <= 128 else 32
    warps = 1 if width <= 128 and rebuilt <= 16 else 2 if width <= 256 else 4
    if layout.rope_block is not None:
        keys = min(keys, max(16, layout.rope_block))
    tile = Tile(keys, warps, 2)
    return LayerKernels(layout_class(layout), tile, tile, SLICES_PER_SM // warps, rebuilt > MOST_REBUILT)
