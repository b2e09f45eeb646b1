"""Rows of codes between a layer's projections and its cache: packed once, stored as bytes.

transformers' own caches store them unchanged; those that quantise what they are given are refused.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers import cache_utils

from ..errors import UsageError
from ..format.layout import LayerLayout
from ..kernels.rows import key_columns, pack_layer, value_columns

# Older versions of transformers have but one layer that quantises.
QUANTISING = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


class CodeRows:
    """Packs the new keys and values of a layer whose layout is coded."""

    def __init__(self, layout: LayerLayout) -> None:
        self.columns = tuple(key_columns(layout)), tuple(value_columns(layout))

    def pack(self, key: Tensor, value: Tensor, use_kernels: bool) -> tuple[Tensor, Tensor]:
        """Latents as the projections put them out, in the model's dtype, into rows of bytes.

        Args:
            key, value: [batch_size, 1, seq_len, qk_width] and [batch_size, 1, seq_len, v_width].
        Returns:
            [batch_size, 1, seq_len, bytes] each, uint8.
        """
        if use_kernels:
            from ..kernels.projection.append import pack_rows  # imports Triton

            return pack_rows(key, self.columns[0]), pack_rows(value, self.columns[1])
        return pack_layer(key, self.columns[0]), pack_layer(value, self.columns[1])


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
    size, common = getattr(layer, "q_group_size", None), math.gcd(layout.qk_width, layout.v_width)
    if size and common % size:
        raise UsageError(
            f"{what} in groups of {size} was given rows of {layout.qk_width} and {layout.v_width} numbers, which do "
            "not divide into them.",
            f"Give generate() cache_config={{'q_group_size': {common & -common}, ...}}.",
        )
