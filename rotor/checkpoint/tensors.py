"""The tensors of a compressed attention layer: the one list that modules, folding, engines and checks use."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

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
    """The tensors of a layer by name under its attention module, without norms that stay as they are.

    q_proj puts out queries (absorbed ones, `width` of each query head, in a model without RoPE), k_proj keys or, with
    the basis inside, latents; v_proj values' latents, where these are joint their part of it (none if k_proj puts out
    latents). o_proj reads `width` of each query head.
    key_basis [g * head_dim, rank]: keys -> latents, at run time. query_basis [g * head_dim, width]: absorbs queries,
    rebuilds keys. key_shift [rank]: what codes add to projected keys. key_constant [num_kv_heads, head_dim]: what codes
    add to rebuilt keys, in the order of the layout; of joint groups what the scale does not multiply.

    Joint groups of codes code what is put out, p [rank], as follows. n = clamp(round(log2(sum_i length_weight_i p_i^2))
    + 8, 0, 15) gives the scale s = 2^((n - 8) / 2). It is n + 1 if by that s^2 sum_i (1/12 + d_i^2) is less, with d_i
    by how much |p_i / s + code_shift_i| exceeds the last level of a channel, 2^(bits - 1) - 1/2. The code of a channel
    is floor(p / s + code_shift), clamped.
    code_shift, length_weight [rank]. The column of the scale in query_basis, and in o_proj or output_basis, has what
    codes add to what the scale multiplies.

    A layer with exact tokens has the source's projections, KV heads in the order of the layout, and at run time also
    value_basis [g * head_dim, rank]: values -> latents (joint ones are the sum of what both bases give).
    output_basis [g * head_dim, width]: what attention over rows puts out -> values of each head. value_shift [rank],
    where values have latents of their own, and value_constant [num_kv_heads, head_dim]: what codes add, as of keys.

    sinks [num_heads]: logits of the model's own, heads as in q_proj.
    The sigmoid of what gate_proj puts out multiplies the output of attention; heads as in q_proj.

    Args:
        biases: which of q, k, v, o have a bias in the source; what codes add makes more of them.
    """
    groups, size, dim = layout.groups, layout.group_size, shape.head_dim
    heads = size * shape.heads_per_kv
    folds_keys, folds_queries, shifted = (
        layout.folds_keys(shape),
        layout.folds_queries(shape),
        layout.shifted_projections(shape),
    )
    ranks, widths = tuple(g.key.rank for g in groups), tuple(g.key.width for g in groups)
    value_ranks, value_widths = tuple(g.values.rank for g in groups), tuple(g.values.width for g in groups)
    hidden, stacked = shape.hidden_size, (size * dim,) * len(groups)
    tensors: dict[str, TensorSpec] = {}

    def projection(name: str, parts: tuple[int, ...], head_axis: int | None = None) -> None:
        tensors[f"{name}_proj.weight"] = TensorSpec((sum(parts), hidden), 0, parts, head_axis=head_axis)
        if name in shifted or name in biases:
            tensors[f"{name}_proj.bias"] = TensorSpec((sum(parts),), 0, parts, head_axis=head_axis)

    def basis(name: str, columns: tuple[int, ...], head_axis: int | None = None) -> None:
        tensors[name] = TensorSpec((size * dim, sum(columns)), 1, columns, head_axis=head_axis)

    def of_codes(name: str, parts: tuple[int, ...], *each: int, head_axis: int | None = None) -> None:
        """A shift of each channel, or a constant of as many numbers as `each` says; numbers have none."""
        if layout.coded:
            tensors[name] = TensorSpec((sum(parts), *each), 0, parts, float32=True, head_axis=head_axis)

    def constant(name: str) -> None:
        of_codes(name, (size,) * len(groups), dim, head_axis=0)

    def times(count: int, parts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(count * part for part in parts)

    if shape.gated:
        parts = times(heads, (dim,) * len(groups))
        tensors["gate_proj.weight"] = TensorSpec((sum(parts), hidden), 0, parts, head_axis=0)
        if "q" in biases:
            tensors["gate_proj.bias"] = TensorSpec((sum(parts),), 0, parts, head_axis=0)
    if shape.sinks:
        tensors["sinks"] = TensorSpec((shape.num_heads,), 0, (heads,) * len(groups), head_axis=0)
    if shape.wide_norms:
        for name, count in (("q_norm.weight", heads), ("k_norm.weight", size)):
            parts = (count * dim,) * len(groups)
            tensors[name] = TensorSpec((sum(parts),), 0, parts, head_axis=0)
    projection("q", times(heads, widths if folds_queries else (dim,) * len(groups)), head_axis=0)
    projection("k", ranks if folds_keys else stacked)
    if layout.has_value_projection(shape):
        projection("v", value_ranks if layout.folds_values else stacked)
    outputs = times(heads, value_widths if layout.folds_values else (dim,) * len(groups))
    tensors["o_proj.weight"] = TensorSpec((hidden, sum(outputs)), 1, outputs, head_axis=1)
    if "o" in shifted or "o" in biases:
        tensors["o_proj.bias"] = TensorSpec((hidden,))
    if not folds_keys:
        basis("key_basis", ranks)
        of_codes("key_shift", ranks)
    if not folds_queries:
        basis("query_basis", widths, head_axis=0)
        constant("key_constant")
    if not layout.folds_values:
        basis("value_basis", value_ranks)
        if layout.has_value_shift:
            of_codes("value_shift", value_ranks)
        basis("output_basis", value_widths, head_axis=0)
        constant("value_constant")
    if layout.scaled:
        of_codes("code_shift", ranks)
        of_codes("length_weight", ranks)
    return tensors


BASES = ("key_basis", "query_basis", "value_basis", "output_basis", "sinks")
"""Names of the tensors in the model's dtype that are no projection's."""

FLOAT32 = ("key_shift", "key_constant", "value_shift", "value_constant", "code_shift", "length_weight")
"""Names of the tensors that keep float32."""
