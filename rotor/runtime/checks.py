"""What compressed attention does not do: said before anything is stored."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import cache_utils

from ..errors import UsageError
from ..format.layout import LayerLayout

# Older versions of transformers have but one layer that quantises.
QUANTISING = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def check_pass(layout: LayerLayout, layer_idx: int, asked: dict[str, Any], mask: Tensor | None, cache: Any) -> None:
    """Raises UsageError where a layer is asked for what it does not do.

    Args:
        asked: the other keyword arguments of its forward pass.
    """
    if asked.get("output_attentions"):
        raise UsageError(
            "output_attentions: compressed layers keep no attention weights.", "Load the source model to see them."
        )
    if asked.get("cache") is not None:
        raise UsageError(
            "transformers' continuous batching (paged attention) cannot serve a compressed cache.", "Use generate()."
        )
    if mask is not None and mask.dim() != 4:
        raise UsageError(
            f"the attention mask has {mask.dim()} dimensions, expected 4.",
            "Leave attn_implementation unset; compressed layers always run rotor's own attention.",
        )
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if layout.coded and isinstance(layer, QUANTISING):
        raise UsageError(
            f"layer {layer_idx}: a quantised cache ({type(layer).__name__}) was given rows of codes: this checkpoint's "
            "cache is coded already.",
            "Leave cache_implementation out, or use 'static' or 'offloaded'.",
        )


def check_mask(mask: Tensor | None, layer_idx: int, expected: tuple[int, int, int, int]) -> None:
    """Raises UsageError where a mask does not broadcast to the logits: the kernels read it unchecked."""
    if mask is not None and any(got not in (1, size) for got, size in zip(mask.shape, expected, strict=True)):
        raise UsageError(
            f"layer {layer_idx}: an attention mask of {list(mask.shape)}, expected {list(expected)} or 1 in place of "
            "any of these (batch_size, num_heads, seq_len, kv_len).",
            "Give a mask over all cached keys and the new ones.",
        )
