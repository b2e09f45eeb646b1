"""Fold a layer: its bases, the codes of their channels and a layout become the tensors of its projections.

`fold_layer` is the whole way:
1. `layer_layout` lays out the groups at the ranks, or the bits, of a plan;
2. `fold_bases` truncates each basis, folds its code in (`fold_code`), and refits what reads values;
3. `rewrite` multiplies the folded bases into W_q, W_k, W_v and W_o.

A checkpoint without weights stores what step 2 gives, and step 3 runs when it is loaded. All products are float64, in
one thread, so that they have the same bits wherever they are made; each tensor is cast exactly once, to the dtype of
the tensor that it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import NumericsError
from ..numerics import is_finite, one_thread
from .bases import BasisPair, ChannelCode, FoldedBases, FoldedBasis, LayerBases, ScaledCode, bases_bytes, levels_of
from .layout import AttentionShape, ExactTokens, GroupLayout, LayerForm, LayerLayout, LayerRanks, ordered_by_class
from .projections import AttentionWeights
from .rows import SIGNED, CodedRow, Row
from .tensors import layer_tensors

RIDGE = 1e-6
"""Share of the mean latent energy added in the least-squares refit of W_o."""


def layer_layout(bases: LayerBases, ranks: LayerRanks, exact: ExactTokens | None = None) -> LayerLayout:
    """Lay out a layer at given ranks, groups ordered by class.

    Args:
        ranks: (key rank, value rank) of each group in the order of the bases; coded bases have their own channels.
        exact: tokens that are kept exactly too.
    """
    size = bases.group_size
    groups = [
        GroupLayout(tuple(range(index * size, (index + 1) * size)), *latents)
        for index, latents in enumerate(bases.stored_latents(ranks))
    ]
    return replace(ordered_by_class(groups, bases.form), exact=exact)


def model_layouts(
    bases: Sequence[LayerBases], ranks: Sequence[LayerRanks], exact: ExactTokens | None = None
) -> list[LayerLayout]:
    """Lay out every layer; see `layer_layout`."""
    return [layer_layout(layer, layer_ranks, exact) for layer, layer_ranks in zip(bases, ranks, strict=True)]


def fold_layer(
    weights: AttentionWeights, bases: LayerBases, layout: LayerLayout, shape: AttentionShape
) -> dict[str, Tensor]:
    """Rewrite the projections of one layer by a run's bases; `layout` is from `layer_layout`.

    Raises:
        NumericsError: see `rewrite`, `fold_code`.
    """
    return rewrite(weights, fold_bases(bases, layout, shape), layout, shape)


def fold_bases(bases: LayerBases, layout: LayerLayout, shape: AttentionShape) -> FoldedBases:
    """Truncate the bases of a layer, fold their codes in and refit W_o; groups in the order of the layout.

    Where tokens are kept exactly, W_o is the source's and reads their values too, so that it is not refitted.

    Raises:
        NumericsError: a code cannot be folded.
    """
    if bases.joint:
        return _fold_joint(bases, layout, shape)
    keys, values = [], []
    qk, vo = bases.latents
    for group in layout.groups:
        index = group.kv_heads[0] // layout.group_size  # in the order of the bases
        keys.append(_truncated(qk, index, group.key))
        value = _truncated(vo, index, group.values)
        if bases.outputs is not None and layout.folds_values:  # one group at a time: they are by far the largest
            outputs = bases.outputs.unflatten(0, (-1, layout.group_size, shape.heads_per_kv))[index]
            value = _refit(value, outputs, layout.group_size)
        values.append(value)
    return FoldedBases(keys, values)


def rewriting_bytes(shape: AttentionShape, form: LayerForm, refit: bool) -> int:
    """Memory of `fold_layer`: its bases and, where W_o is refitted, the moments of outputs, in three copies; and the
    projections in float64, before and after."""
    outputs = shape.num_heads * (form.group_size * shape.head_dim) ** 2 * 8 if refit else 0
    return 3 * outputs + 3 * bases_bytes(form, shape) + shape.projection_elements * 2 * 8


def _fold_joint(bases: LayerBases, layout: LayerLayout, shape: AttentionShape) -> FoldedBases:
    keys: list[FoldedBasis] = []
    values: list[FoldedBasis] = []
    codes = []
    for group in layout.groups:
        index = group.kv_heads[0] // layout.group_size
        basis, code = joint_basis(bases.latents[0], index, group.key)
        for side, sides in enumerate((keys, values)):
            sides.append(joint_side(basis, side, layout.group_size))
        if code is not None:
            codes.append(code)
    return FoldedBases(keys, values, codes)


def joint_basis(pair: BasisPair, group: int, row: Row) -> tuple[FoldedBasis, ScaledCode | None]:
    """The basis of a joint group over each head's key and value, with its code folded in.

    With p = x E / step as projections put it out, x - m has the latent p - m E / step in steps; m is what the scale of
    a row does not multiply.

    Raises:
        NumericsError: a scale is not positive, or a result not finite.
    """
    if not isinstance(row, CodedRow):
        return _truncated(pair, group, row), None
    assert pair.mean is not None
    assert pair.lengths is not None
    code, rank = pair.codes[group], row.rank
    basis = fold_code(pair.encode[group], pair.decode[group], code, row)
    mean, step = pair.mean[group], code.scale[:rank]
    lengths = pair.lengths[group, :rank]
    length = step.square() * lengths / lengths.count_nonzero().clamp(min=1)
    basis = replace(basis, shift=-(mean @ pair.encode[group, :, :rank]) / step, mean=mean)
    _check_folded(basis)
    return basis, ScaledCode(-code.mean[:rank] / step, length)


def joint_side(basis: FoldedBasis, side: int, group_size: int) -> FoldedBasis:
    """Keys (0) or values (1) of a basis of both, head by head."""

    def rows(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.unflatten(0, (group_size, 2, -1))[:, side].flatten(0, 1)

    encode, read = (
        tensor.unflatten(0, (group_size, 2, -1))[:, side].flatten(0, 1) for tensor in (basis.encode, basis.read)
    )
    return replace(basis, encode=encode, read=read, dropped=rows(basis.dropped), mean=rows(basis.mean))


def _truncated(pair: BasisPair, group: int, latent: Row) -> FoldedBasis:
    """The basis of a group cut to the channels of a latent, with their code folded in."""
    encode, decode = pair.encode[group], pair.decode[group]
    if not isinstance(latent, CodedRow):
        return FoldedBasis(latent, encode[:, : latent.rank], decode[:, : latent.rank])
    return fold_code(encode, decode, pair.codes[group], latent)


def fold_code(encode: Tensor, decode: Tensor, code: ChannelCode, channels: CodedRow) -> FoldedBasis:
    """Fold a code into the bases of one group.

    With z = constant + scale sum_i l_i (n_i - 8), n_i the nibbles and crumbs of a row and l_i how many levels a unit of
    each counts (see `rows`):
    - what puts out the latent (W_k, W_v, or the key basis) is divided by the scale and shifted by the mean, so that its
      output only has to be floored and clamped;
    - what reads the latent (the query's basis, which rebuilds keys too, and W_o) has a column for each n_i, multiplied
      by l_i and the scale, and a zero for each empty slot;
    - the constants become one key or value of each head, together with the means of the channels that are left out. The
      constant key is added to keys as they are read; without RoPE it adds the same to all logits of a query, which
      softmax does not see, and is dropped. Attention weights sum to one, so the constant value is a bias of o_proj.
      Where other tokens are exact, both constants belong to the share of the codes and are added at run time.

    Args:
        encode, decode: [n, columns], float64: latent = x @ encode, x is read as latent @ decode^T.
        code: of these columns, those that are stored first, as `channels` has them.
    Raises:
        NumericsError: a scale is not positive, or a result not finite.
    Source: docs/design.md, Mathematics, Nibbles: "Scales and means are folded".
    """
    rank = channels.rank
    assert code.bits[:rank].tolist() == list(channels.bits)
    scale, mean = code.scale[:rank], code.mean[:rank]
    if not (scale > 0).all():
        raise NumericsError("a code has a scale that is not positive.", "Calibrate again.")
    offset = mean / scale + 0.5 - code.levels[:rank] / 2 + SIGNED * levels_of(channels).sum(1)
    dropped = decode[:, rank:] @ code.mean[rank:]
    folded = FoldedBasis(channels, encode[:, :rank] / scale, decode[:, :rank] * scale, -mean / scale, offset, dropped)
    _check_folded(folded)
    return folded


def _check_folded(basis: FoldedBasis) -> None:
    for name, tensor in basis.tensors().items():
        if not is_finite(tensor):
            raise NumericsError(f"{name} is not finite with the code folded in.", "Calibrate with --dtype float32.")


def _refit(basis: FoldedBasis, outputs: Tensor, group_size: int) -> FoldedBasis:
    """Refit by least squares what each query head reads its output back with, given the latents that are kept.

    Minimises E |o - reader (encode^T o_group)|^2 for each query head over its own outputs, by a correction to `read`
    with a small ridge; at full rank the correction is zero. The means of what was dropped are in it.

    Args:
        outputs: [g, heads_per_kv, g * head_dim, g * head_dim].
    """
    read = basis.read.unflatten(0, (group_size, -1)).unsqueeze(1)
    latent = outputs @ basis.encode
    gram = basis.encode.mT @ latent
    index = torch.arange(group_size)
    of_head = latent.unflatten(-2, (group_size, -1))[index, :, index]  # rows of each KV head, [g, heads_per_kv, ...]
    residual = of_head - read @ gram
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(gram.dtype).tiny)
    gram = gram + torch.diag_embed(ridge.unsqueeze(-1).expand(gram.shape[:-1]))
    with one_thread():
        read = read + torch.linalg.solve(gram, residual.mT).mT
    dropped = None if basis.dropped is None else torch.zeros_like(basis.dropped)
    return replace(basis, read=read.transpose(0, 1).flatten(1, 2), dropped=dropped)


def rewrite(
    weights: AttentionWeights, bases: FoldedBases, layout: LayerLayout, shape: AttentionShape
) -> dict[str, Tensor]:
    """Rewrite the projections of one layer: the tensors that `tensors.layer_tensors` lists.

    Where latents are coded, what stored keys lack is `key_constant`, and what values lack is in o_proj's bias. With
    exact tokens projections are the source's, KV heads in the order of the layout, and nothing is folded into them.

    Raises:
        NumericsError: a result overflows the dtype or is not finite; names it.
    Source: FDC section 5.1 for queries and keys, ZACK section 5.1 for the folding of W_v and W_o; docs/design.md.
    """
    with one_thread():
        return _rewritten(weights, bases, layout, shape)


def _rewritten(
    weights: AttentionWeights, bases: FoldedBases, layout: LayerLayout, shape: AttentionShape
) -> dict[str, Tensor]:
    keys, values = ([basis.on(weights.v_weight.device) for basis in side] for side in (bases.keys, bases.values))
    if layout.scaled and not layout.folds_keys(shape):
        keys, values = reading_rounded(keys, values, weights.v_weight.dtype, layout.folds_values)
    key_encode, value_encode = [basis.encode for basis in keys], [basis.encode for basis in values]
    key_decode = [basis.decode for basis in keys]
    folds_keys, folds_queries, folds_values = layout.folds_keys(shape), layout.folds_queries(shape), layout.folds_values
    heads = torch.tensor(layout.kv_head_order)
    tensors: dict[str, Tensor | None] = {}
    for kind in ("weight", "bias"):
        q, k, v = (_by_kv_head(getattr(weights, f"{p}_{kind}"), heads, shape) for p in "qkv")
        tensors[f"q_proj.{kind}"] = (
            _flatten_kv(q) if q is None or not folds_queries else _absorbed(q, key_decode, layout)
        )
        of_keys = _fold(k, key_encode, layout) if folds_keys else _flatten_kv(k)
        of_values = _fold(v, value_encode, layout) if folds_values else _flatten_kv(v)
        if not layout.has_value_projection(shape):
            of_keys, of_values = _sum(of_keys, of_values), None
        tensors[f"k_proj.{kind}"], tensors[f"v_proj.{kind}"] = of_keys, of_values

    columns = _by_kv_head(weights.o_weight.T, heads, shape)
    assert columns is not None
    tensors["o_proj.weight"] = (_folded_output(columns, values, layout) if folds_values else columns.flatten(0, 2)).T
    tensors["o_proj.bias"] = weights.o_bias
    if not folds_keys:
        tensors["key_basis"] = torch.cat(key_encode, dim=-1)
    if not folds_queries:
        tensors["query_basis"] = torch.cat(key_decode, dim=-1)
    if not folds_values:
        tensors["value_basis"] = torch.cat(value_encode, dim=-1)
        tensors["output_basis"] = torch.cat([basis.decode for basis in values], dim=-1)
    if layout.coded:
        before = tensors["k_proj.bias"]
        if folds_keys:
            tensors["k_proj.bias"], keys = _shifted(before, keys, weights.k_weight.dtype)
        else:
            tensors["key_shift"] = torch.cat([basis.shift for basis in keys if basis.shift is not None])
        if not layout.has_value_projection(shape):  # values are read from what k_proj puts out
            _, values = _shifted(before, values, weights.k_weight.dtype)
        elif "v" in layout.shifted_projections(shape):
            tensors["v_proj.bias"], values = _shifted(tensors["v_proj.bias"], values, weights.v_weight.dtype)
        elif layout.has_value_shift:
            tensors["value_shift"] = torch.cat([basis.shift for basis in values if basis.shift is not None])
        if not folds_queries:
            tensors["key_constant"] = _constants(keys, shape)
        if folds_values:
            constants = [_by_query_head(basis.constant, layout, 1) for basis in values]
            tensors["o_proj.bias"] = _with_constants(weights.o_bias, columns, constants, layout)
        else:
            tensors["value_constant"] = _constants(values, shape)
    if shape.gated:
        for kind in ("weight", "bias"):
            gate = _by_kv_head(getattr(weights, f"gate_{kind}"), heads, shape)
            tensors[f"gate_proj.{kind}"] = _flatten_kv(gate)
    if weights.sinks is not None:
        tensors["sinks"] = weights.sinks.reshape(shape.num_kv_heads, -1)[heads].flatten()
    if shape.wide_norms:
        for name, weight in weights.norms.items():
            tensors[f"{name}.weight"] = _flatten_kv(_by_kv_head(weight, heads, shape))
    names = {"shift": "code_shift", "length": "length_weight"}
    tensors |= {names[name]: tensor for name, tensor in bases.code_tensors().items()}
    specs = layer_tensors(layout, shape, weights.bias_names)
    made = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {n: s.shape for n, s in specs.items()}
    return {
        name: _cast(made[name], torch.float32 if spec.float32 else _dtype_of(name, weights), weights.prefix + name)
        for name, spec in specs.items()
    }


def reading_rounded(
    keys: list[FoldedBasis], values: list[FoldedBasis], dtype: torch.dtype, folds_values: bool
) -> tuple[list[FoldedBasis], list[FoldedBasis]]:
    """Move what reads the latents of joint groups by what rounding changes in the bases that make them.

    With x = p R^T + mean, a basis E + D puts out p (1 + R^T D) about
    the mean, so that (1 + R^T D)^-1 R^T reads x.
    """
    sides: tuple[list[FoldedBasis], list[FoldedBasis]] = [], []
    for pair in zip(keys, values, strict=True):
        rounded = [basis.encode.to(dtype).to(basis.encode.dtype) - basis.encode for basis in pair]
        if folds_values:
            rounded[1] = torch.zeros_like(rounded[1])
        eye = torch.eye(pair[0].encode.shape[1], dtype=pair[0].encode.dtype, device=pair[0].encode.device)
        put_out = eye + sum(basis.read.mT @ moved for basis, moved in zip(pair, rounded, strict=True))
        of_mean = torch.zeros_like(eye[0])
        for basis, moved in zip(pair, rounded, strict=True):
            assert basis.mean is not None
            of_mean = of_mean + basis.mean @ moved
        for side, basis in zip(sides, pair, strict=True):
            assert basis.shift is not None
            side.append(replace(basis, read=torch.linalg.solve(put_out, basis.read.mT).mT, shift=basis.shift - of_mean))
    return sides


def _constants(bases: list[FoldedBasis], shape: AttentionShape) -> Tensor:
    """Constants that codes add to the keys or values that are read, [num_kv_heads, head_dim]."""
    return torch.cat([basis.constant for basis in bases]).unflatten(0, (-1, shape.head_dim))


def _folded_output(columns: Tensor, values: list[FoldedBasis], layout: LayerLayout) -> Tensor:
    """Fold what reads the latents of values into W_o, [num_kv_heads, heads_per_kv, head_dim, hidden_size].

    Returns [sum over query heads of width, hidden_size].
    """
    return torch.cat(
        [
            (_by_query_head(basis.decode, layout, 2).mT @ block.to(torch.float64)).flatten(0, 2)
            for basis, block in zip(values, _per_group(columns, layout), strict=True)
        ]
    )


def _absorbed(query: Tensor, decode: list[Tensor], layout: LayerLayout) -> Tensor:
    """Absorb queries [num_kv_heads, heads_per_kv, head_dim, ...] into the latents of their keys, without RoPE."""
    blocks = _per_group(query.to(torch.float64), layout)
    return torch.cat(
        [
            torch.einsum("gdr,gpd...->gpr...", basis.unflatten(0, (layout.group_size, -1)), block).flatten(0, 2)
            for basis, block in zip(decode, blocks, strict=True)
        ]
    )


def _with_constants(bias: Tensor | None, columns: Tensor, constants: list[Tensor], layout: LayerLayout) -> Tensor:
    """Add to the bias of o_proj what it makes of the constant values.

    Args:
        columns: of W_o, [num_kv_heads, heads_per_kv, head_dim, hidden_size]. constants: of each group, [group_size,
            heads_per_kv or 1, head_dim].
    """
    total = columns.new_zeros(columns.shape[-1], dtype=torch.float64) if bias is None else bias.to(torch.float64)
    for constant, block in zip(constants, _per_group(columns, layout), strict=True):
        total = total + (constant.unsqueeze(-1) * block.to(torch.float64)).sum((0, 1, 2))
    return total


def _shifted(bias: Tensor | None, bases: list[FoldedBasis], dtype: torch.dtype) -> tuple[Tensor, list[FoldedBasis]]:
    """Round the bias of a projection into codes to its dtype, and move the bases by what the rounding changed.

    A mean is many scales large, so rounding to 16 bits may move it by a good part of a scale, for every token alike.
    The bases that read the codes correct for that.
    """
    shifts = [basis.shift for basis in bases if basis.shift is not None]
    unrounded = torch.cat(shifts)
    unrounded = unrounded if bias is None else unrounded + bias
    rounded = unrounded.to(dtype).to(unrounded.dtype)
    moved = (rounded - unrounded).split([len(shift) for shift in shifts])
    return rounded, [basis.shifted(part) for basis, part in zip(bases, moved, strict=True)]


def _by_kv_head(tensor: Tensor | None, heads: Tensor, shape: AttentionShape) -> Tensor | None:
    """[n * head_dim, ...] -> [num_kv_heads, n / num_kv_heads, head_dim, ...], KV heads in the order of the layout."""
    if tensor is None:
        return None
    return tensor.reshape(shape.num_kv_heads, -1, shape.head_dim, *tensor.shape[1:])[heads]


def _per_group(tensor: Tensor, layout: LayerLayout) -> tuple[Tensor, ...]:
    return tensor.split(layout.group_size)


def _by_query_head(tensor: Tensor, layout: LayerLayout, dims: int) -> Tensor:
    """[(heads_per_kv,) g * head_dim, ...] of `dims` dimensions behind that of query heads -> [g, heads_per_kv or 1,
    head_dim, ...]."""
    of_heads = tensor if tensor.dim() > dims else tensor.unsqueeze(0)
    return of_heads.unflatten(1, (layout.group_size, -1)).transpose(0, 1)


def _flatten_kv(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten(0, 2)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Sum of the tensors that are not None."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _fold(tensor: Tensor | None, encode: list[Tensor], layout: LayerLayout) -> Tensor | None:
    """Fold projections [num_kv_heads, 1, head_dim, ...] into latents: encode^T W, group by group."""
    if tensor is None:
        return None
    blocks = (block.flatten(0, 2).to(torch.float64) for block in _per_group(tensor, layout))
    return torch.cat([basis.T @ block for basis, block in zip(encode, blocks, strict=True)])


def _dtype_of(name: str, weights: AttentionWeights) -> torch.dtype:
    """Dtype of the tensor that a new one replaces, else of its projection's weight, else of v_proj."""
    if "_proj." not in name:
        return weights.norms.get(name.removesuffix(".weight"), weights.v_weight).dtype
    side, _, kind = name.partition("_proj.")
    replaced: Tensor | None = getattr(weights, f"{side}_{kind}")
    return (getattr(weights, f"{side}_weight") if replaced is None else replaced).dtype


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    result = tensor.to(dtype).contiguous()
    if not result.is_meta and not is_finite(result):
        raise NumericsError(
            f"{name}: not finite after the cast to {dtype} (largest magnitude {tensor.abs().max().item():.3g}).",
            "Convert the source checkpoint to bfloat16 or float32 and export again.",
        )
    return result
