"""Rows of codes in transformers' caches: stored unchanged; caches that quantise what they are given are refused."""

from __future__ import annotations

import math
from typing import Any

from transformers import cache_utils

from ..errors import UsageError
from ..format.layout import LayerLayout

# Older versions of transformers have but one layer that quantises.
QUANTISING = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def check_cache(cache: Any, layer_idx: int, layout: LayerLayout) -> None:
    """Raises UsageError where a cache that quantises cannot keep a layer's rows.

    Rows of codes are bytes, no numbers. Rows of numbers are quantised in groups that go on from token to token, into
    which every number of them has to divide.
    """
    layers = getattr(cache, "layers", None) or []
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not isinstance(layer, QUANTISING):
        return
    what = f"layer {layer_idx}: a quantised cache ({type(layer).__name__})"
    if layout.coded:
        raise UsageError(
            f"{what} was given rows of codes: this checkpoint's cache is coded already.",
            "Leave cache_implementation out, or use 'static' or 'offloaded'.",
        )
    widths = [part // 2 for part in layout.row_bytes(2)]
    size, common = getattr(layer, "q_group_size", None), math.gcd(*widths)
    if size and common % size:
        raise UsageError(
            f"{what} in groups of {size} was given rows of {widths[0]} and {widths[1]} numbers, which do "
            "not divide into them.",
            f"Give generate() cache_config={{'q_group_size': {common & -common}, ...}}.",
        )
