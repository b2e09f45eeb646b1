"""Predicted multiplications of a prompt, by which its time is predicted: those of a layer's attention and projections.

A prompt's attention is limited by products of matrices. Every query is multiplied with the keys of itself and the
tokens before it, and the weights with their values: two products as wide as `dense_attention` pads both sides. Rows of
numbers after RoPE or without it are attended to as they are; others are expanded first, and rows beside exact tokens
are not read. Softmax, norms, writing the cache and everything that is no product are left out.

Source: the roofline model, as in `cost.py`.
"""

from __future__ import annotations

import math

from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.checkpoint.tensors import BASES, layer_tensors
from rotor.kernels.reference.attention import fused_width


def layer_flops(layout: LayerLayout, shape: AttentionShape, tokens: int) -> float:
    """Multiplications and additions of a compressed layer for a prompt of so many tokens."""
    projections = sum(
        math.prod(spec.shape) for name, spec in layer_tensors(layout, shape, ()).items() if name not in BASES
    )
    heads = layout.group_size * shape.heads_per_kv
    attention = 0.0
    for group in layout.groups:
        key_width = group.key.width if layout.meets_latents(group.key, shape) else shape.head_dim
        value_width = group.values.width
        if layout.exact is not None:
            key_width = value_width = shape.head_dim
        attention += heads * _attention(fused_width(key_width, value_width), tokens)
    return 2 * tokens * projections + bases_flops(layout, shape, tokens) + attention


def bases_flops(layout: LayerLayout, shape: AttentionShape, tokens: int) -> float:
    """The part of `layer_flops` that the bases cost: what compresses keys and queries after RoPE, or rebuilds keys."""
    absorbs = all(layout.meets_latents(group.key, shape) for group in layout.groups)
    times = shape.heads_per_kv if absorbs else 1  # every query head is absorbed, every KV head's key rebuilt once
    return (
        2.0
        * tokens
        * sum(
            math.prod(spec.shape) * (times if name == "query_basis" else 1)
            for name, spec in layer_tensors(layout, shape, ()).items()
            if name in BASES
        )
    )


def uncompressed_layer_flops(shape: AttentionShape, tokens: int) -> float:
    """Multiplications and additions of a layer of the uncompressed model for a prompt of so many tokens."""
    attention = shape.num_heads * _attention(fused_width(shape.head_dim, shape.head_dim), tokens)
    return 2 * tokens * shape.projection_elements + attention


def _attention(width: int, tokens: int) -> float:
    """A query head's causal attention, with keys and values of so many numbers."""
    return 2 * 2 * width * tokens * (tokens + 1) / 2
