"""The tensors of a compressed attention layer: the one list that modules, folding, engines and checks use."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from .channels import Parted
from .layout import AttentionShape, LayerLayout


class TensorSpec(NamedTuple):
    """Shape of one tensor, and how it divides.

    axis: the axis along which each group of the layer has a part; None: groups have no parts.
    parts: sizes of the parts, in the order of the layout.
    float32: the dtype stays float32 whatever the model's is, since the tensor is added before anything is rounded.
    head_axis: the axis along which each KV head of a group has an equal share of the group's part; None: every head
        needs the whole part.
    """

    shape: tuple[int, ...]
    axis: int | None = None
    parts: tuple[int, ...] = ()
    float32: bool = False
    head_axis: int | None = None


def layer_tensors(layout: LayerLayout, shape: AttentionShape, biases: Collection[str]) -> dict[str, TensorSpec]:
    """The tensors of a layer by name under its attention module, without the norms of the source.

    q_proj puts out queries (absorbed ones, `width` of each query head, in a model without RoPE), k_proj keys or, with
    the basis inside, latents; v_proj values' latents, where these are joint their part of it (none if k_proj puts out
    latents). o_proj reads `width` of each query head.
    key_basis [g * head_dim, rank]: keys -> latents, at run time. query_basis [g * head_dim, width]: absorbs queries,
    rebuilds keys. key_shift [rank]: what codes add to projected keys. key_constant [num_kv_heads, head_dim]: what codes
    add to rebuilt keys, in the order of the layout; of joint groups what the scale does not multiply.

    Joint groups of codes code what is put out, p [rank], fast channels first, as follows. n = clamp(round(log2(sum_i
    length_weight_i p_i^2)) + 8, 0, 15) gives the scale s = 2^((n - 8) / 2). With t = p / s + code_shift, a fast channel
    has the code floor(t), clamped, and the error e = code + 1/2 - t; the rest is coded as t + e error_basis.
    code_shift, length_weight [rank]. error_basis [sum over groups of fast rank x rank of the rest], flat: the matrix of
    each group, one after another. The column of the scale in query_basis and o_proj has what codes add to what the
    scale multiplies.

    Args:
        biases: which of q, k, v, o have a bias in the source; what codes add makes more of them.
    """
    groups, size, dim = layout.groups, layout.group_size, shape.head_dim
    heads = size * shape.heads_per_kv
    folded, rotary, shifted = layout.folds_keys(shape), bool(shape.rotary_dim), layout.shifted_projections(shape)
    ranks, widths = tuple(g.key.rank for g in groups), tuple(g.key.width for g in groups)
    value_ranks, value_widths = tuple(g.values.rank for g in groups), tuple(g.values.width for g in groups)
    hidden = shape.hidden_size
    tensors: dict[str, TensorSpec] = {}

    def projection(name: str, parts: tuple[int, ...], head_axis: int | None = None) -> None:
        tensors[f"{name}_proj.weight"] = TensorSpec((sum(parts), hidden), 0, parts, head_axis=head_axis)
        if name in shifted or name in biases:
            tensors[f"{name}_proj.bias"] = TensorSpec((sum(parts),), 0, parts, head_axis=head_axis)

    def times(count: int, parts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(count * part for part in parts)

    projection("q", times(heads, (dim,) * len(groups) if rotary else widths), head_axis=0)
    projection("k", ranks if folded else (size * dim,) * len(groups))
    if layout.has_value_projection(shape):
        projection("v", value_ranks)
    outputs = times(heads, value_widths)
    tensors["o_proj.weight"] = TensorSpec((hidden, sum(outputs)), 1, outputs, head_axis=1)
    if "o" in shifted or "o" in biases:
        tensors["o_proj.bias"] = TensorSpec((hidden,))
    if not folded:
        tensors["key_basis"] = TensorSpec((size * dim, sum(ranks)), 1, ranks)
        if shifted:
            tensors["key_shift"] = TensorSpec((sum(ranks),), 0, ranks, float32=True)
    if rotary:
        tensors["query_basis"] = TensorSpec((size * dim, sum(widths)), 1, widths, head_axis=0)
        if shifted:
            constants = (size,) * len(groups)
            tensors["key_constant"] = TensorSpec((shape.num_kv_heads, dim), 0, constants, float32=True, head_axis=0)
    if layout.scaled:
        for name in ("code_shift", "length_weight"):
            tensors[name] = TensorSpec((sum(ranks),), 0, ranks, float32=True)
        products = tuple(g.key.fast_rank * g.key.rest.rank for g in groups if isinstance(g.key, Parted))
        if layout.fast_planes:
            tensors["error_basis"] = TensorSpec((sum(products),), 0, products)
    return tensors


FLOAT32 = ("key_shift", "key_constant", "code_shift", "length_weight")
"""Names of the tensors that keep float32."""
