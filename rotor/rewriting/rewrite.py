"""Rewrite the projections of an attention layer for a layout: rotate, truncate, reorder, fold.

All products are float64; each tensor is cast exactly once, to the dtype of the tensor that it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..bases.layer import LayerBases
from ..bases.weights import AttentionWeights
from ..codes.fold import FoldedCode, fold_code
from ..codes.layer import CodedBases
from ..errors import NumericsError
from ..format.channels import Channels, Latent, Numbers
from ..format.layout import AttentionShape, GroupLayout, LayerLayout, LayerRanks, ordered_by_class
from ..format.tensors import layer_tensors
from ..numerics import one_thread

RIDGE = 1e-6
"""Share of the mean latent energy added in the least-squares refit of W_o."""


def layer_layout(bases: LayerBases, ranks: LayerRanks) -> tuple[LayerLayout, tuple[int, ...]]:
    """Lay out a layer at given ranks.

    Args:
        ranks: (key rank, value rank) of each group in the order of the bases; of coded ones, what their channels count.
    Returns:
        The layout (groups ordered by class), and for each position the index of its group in `bases`.
    """
    size = bases.group_size
    latents: Sequence[tuple[Latent, Latent | None]] = [
        (Numbers(key), None if bases.joint else Numbers(value)) for key, value in ranks
    ]
    if isinstance(bases, CodedBases):
        latents = bases.channels
    groups = [GroupLayout(tuple(range(i * size, (i + 1) * size)), *pair) for i, pair in enumerate(latents)]
    return ordered_by_class(groups, bases.form)


def bias_names(weights: AttentionWeights) -> frozenset[str]:
    """Names of those of q, k, v, o that have a bias."""
    return frozenset(p for p in "qkvo" if getattr(weights, f"{p}_bias") is not None)


def rewrite_layer(
    weights: AttentionWeights,
    bases: LayerBases,
    layout: LayerLayout,
    order: tuple[int, ...],
    shape: AttentionShape,
) -> dict[str, Tensor]:
    """Rewrite the projections of one layer: the tensors that `format.tensors.layer_tensors` lists.

    Of coded bases, all that puts out a channel is divided by its step and shifted by its mean, all that reads one has
    a column for each nibble. What keys lack then is `key_constant`; what values lack is in o_proj's bias.

    Args:
        layout, order: from `layer_layout`.
    Raises:
        NumericsError: a result overflows the dtype or is not finite; names it.
    Source: FDC section 5.1 for queries and keys, ZACK section 5.1 for the folding of W_v and W_o; docs/design.md.
    """
    keys, values = _folded_codes(bases, layout, order, weights.v_weight.device)
    if keys:
        key_encode, key_decode = [code.encode for code in keys], [code.decode for code in keys]
        value_encode, value_read = [code.encode for code in values], [code.read for code in values]
    else:
        key_encode, key_decode, value_encode, value_read = _truncated(bases, layout, order)
    folded, rotary = layout.folds_keys(shape), bool(shape.rotary_dim)
    heads = torch.tensor(layout.kv_head_order)
    tensors: dict[str, Tensor | None] = {}
    for kind in ("weight", "bias"):
        q, k, v = (_by_kv_head(getattr(weights, f"{p}_{kind}"), heads, shape) for p in "qkv")
        tensors[f"q_proj.{kind}"] = _flatten_kv(q) if rotary or q is None else _absorbed(q, key_decode, layout)
        of_keys = _fold(k, key_encode, layout) if folded else _flatten_kv(k)
        of_values = _fold(v, value_encode, layout)
        if layout.joint and folded:
            of_keys, of_values = _sum(of_keys, of_values), None
        tensors[f"k_proj.{kind}"], tensors[f"v_proj.{kind}"] = of_keys, of_values

    columns = _by_kv_head(weights.o_weight.T, heads, shape)
    assert columns is not None
    readers = [_by_head(d, layout).unsqueeze(1) for d in value_read]
    if bases.outputs is not None:
        outputs = bases.outputs.unflatten(0, (-1, layout.group_size, shape.heads_per_kv))
        ordered = (outputs[i] for i in order)  # one at a time: they are by far the largest
        readers = [_refit(*parts) for parts in zip(readers, value_encode, value_read, ordered, strict=True)]
    placed = [reader @ code.nibbles for reader, code in zip(readers, values, strict=True)] if values else readers
    tensors["o_proj.weight"] = torch.cat(
        [
            (reader.mT @ block.to(torch.float64)).flatten(0, 2)
            for reader, block in zip(placed, _per_group(columns, layout), strict=True)
        ]
    ).T
    tensors["o_proj.bias"] = weights.o_bias
    if not folded:
        tensors["key_basis"] = torch.cat(key_encode, dim=-1)
    if rotary:
        tensors["query_basis"] = torch.cat(key_decode, dim=-1)
    if keys:
        before = tensors["k_proj.bias"]
        if folded:
            tensors["k_proj.bias"], keys = _shifted(before, keys, weights.k_weight.dtype)
        else:
            tensors["key_shift"] = torch.cat([code.shift for code in keys])
        if layout.joint and folded:
            _, values = _shifted(before, values, weights.k_weight.dtype)
        elif not layout.joint:
            tensors["v_proj.bias"], values = _shifted(tensors["v_proj.bias"], values, weights.v_weight.dtype)
        if rotary:
            tensors["key_constant"] = torch.cat([code.constant for code in keys]).unflatten(0, (-1, shape.head_dim))
        refitted = bases.outputs is not None  # then the readers have taken the means of what was dropped into account
        constants = [
            reader @ code.offset + (0 if refitted else code.dropped.unflatten(0, (layout.group_size, 1, -1)))
            for reader, code in zip(readers, values, strict=True)
        ]
        tensors["o_proj.bias"] = _with_constants(weights.o_bias, columns, constants, layout)
    specs = layer_tensors(layout, shape, bias_names(weights))
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {n: s.shape for n, s in specs.items()}
    return {
        name: _cast(found[name], torch.float32 if spec.float32 else _dtype_of(name, weights), weights.prefix + name)
        for name, spec in specs.items()
    }


def _absorbed(query: Tensor, decode: list[Tensor], layout: LayerLayout) -> Tensor:
    """Queries [num_kv_heads, heads_per_kv, head_dim, ...] in the latents of their keys, without RoPE."""
    blocks = _per_group(query.to(torch.float64), layout)
    return torch.cat(
        [
            torch.einsum("gdr,gpd...->gpr...", _by_head(own, layout), block).flatten(0, 2)
            for own, block in zip(decode, blocks, strict=True)
        ]
    )


def _with_constants(bias: Tensor | None, columns: Tensor, constants: list[Tensor], layout: LayerLayout) -> Tensor:
    """The bias of o_proj with what it makes of the constant values.

    Args:
        columns: of W_o, [num_kv_heads, heads_per_kv, head_dim, hidden_size]. constants: of each group, [group_size,
            heads_per_kv or 1, head_dim].
    """
    total = columns.new_zeros(columns.shape[-1], dtype=torch.float64) if bias is None else bias.to(torch.float64)
    for constant, block in zip(constants, _per_group(columns, layout), strict=True):
        total = total + (constant.unsqueeze(-1) * block.to(torch.float64)).sum((0, 1, 2))
    return total


def _folded_codes(
    bases: LayerBases, layout: LayerLayout, order: tuple[int, ...], device: torch.device
) -> tuple[list[FoldedCode], list[FoldedCode]]:
    """The codes of keys and of values of each group in the order of the layout, folded; none of bases without codes."""
    if not isinstance(bases, CodedBases):
        return [], []
    key, value = [], []
    for group, i in zip(layout.groups, order, strict=True):
        assert isinstance(group.key, Channels)
        assert isinstance(group.values, Channels)
        key.append(fold_code(bases.qk.encode[i], bases.qk.decode[i], bases.key_codes[i], group.key).to(device))
        value.append(fold_code(bases.vo.encode[i], bases.vo.decode[i], bases.value_codes[i], group.values).to(device))
    return key, value


def _shifted(bias: Tensor | None, codes: list[FoldedCode], dtype: torch.dtype) -> tuple[Tensor, list[FoldedCode]]:
    """The bias of a projection into codes, as it is in its dtype, and the codes with what that rounding moved.

    Means are many steps large: a bias of 16 bits may be off by a good part of one, the same for every token. What reads
    the codes takes it into account.
    """
    exact = torch.cat([code.shift for code in codes])
    exact = exact if bias is None else exact + bias
    rounded = exact.to(dtype).to(exact.dtype)
    moved = (rounded - exact).split([len(code.shift) for code in codes])
    return rounded, [code.shifted(part) for code, part in zip(codes, moved, strict=True)]


def _refit(reader: Tensor, encode: Tensor, decode: Tensor, outputs: Tensor) -> Tensor:
    """Least squares: what each query head should read its output back with, given the latents that are kept.

    Minimises E |o - reader (encode^T o_group)|^2 for each query head over its own outputs, by a correction to `reader`
    with a small ridge; at full rank the correction is zero.

    Args:
        reader: [g, 1, head_dim, rank], the rows of `decode` of each KV head.
        encode, decode: [g * head_dim, rank].
        outputs: [g, heads_per_kv, g * head_dim, g * head_dim].
    Returns:
        [g, heads_per_kv, head_dim, rank].
    """
    size, dim = reader.shape[0], reader.shape[2]
    latent = outputs @ encode
    gram = encode.mT @ latent
    index = torch.arange(size)
    own = latent.unflatten(-2, (size, dim))[index, :, index]  # each KV head's own rows, [g, heads_per_kv, ...]
    residual = own - decode.unflatten(0, (size, dim)).unsqueeze(1) @ gram
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(gram.dtype).tiny)
    gram = gram + torch.diag_embed(ridge.unsqueeze(-1).expand(gram.shape[:-1]))
    with one_thread():
        return reader + torch.linalg.solve(gram, residual.mT).mT


def _truncated(bases: LayerBases, layout: LayerLayout, order: tuple[int, ...]) -> tuple[list[Tensor], ...]:
    """(key encode, key decode, value encode, value decode): lists of [g * head_dim, rank], groups as in the layout."""
    keys, values = [g.key.rank for g in layout.groups], [g.values.rank for g in layout.groups]

    def columns(basis: Tensor, ranks: list[int]) -> list[Tensor]:
        return [basis[i, :, :rank] for i, rank in zip(order, ranks, strict=True)]

    return (
        columns(bases.qk.encode, keys),
        columns(bases.qk.decode, keys),
        columns(bases.vo.encode, values),
        columns(bases.vo.decode, values),
    )


def _by_kv_head(tensor: Tensor | None, heads: Tensor, shape: AttentionShape) -> Tensor | None:
    """[n * head_dim, ...] -> [num_kv_heads, n / num_kv_heads, head_dim, ...], KV heads in the order of the layout."""
    if tensor is None:
        return None
    return tensor.reshape(shape.num_kv_heads, -1, shape.head_dim, *tensor.shape[1:])[heads]


def _per_group(tensor: Tensor, layout: LayerLayout) -> tuple[Tensor, ...]:
    return tensor.split(layout.group_size)


def _by_head(basis: Tensor, layout: LayerLayout) -> Tensor:
    """[g * head_dim, rank] -> [g, head_dim, rank]."""
    return basis.reshape(layout.group_size, -1, basis.shape[-1])


def _flatten_kv(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten(0, 2)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Of those that there are."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _fold(tensor: Tensor | None, encode: list[Tensor], layout: LayerLayout) -> Tensor | None:
    """Projections [num_kv_heads, 1, head_dim, ...] into latents: encode^T W, group by group."""
    if tensor is None:
        return None
    blocks = (block.flatten(0, 2).to(torch.float64) for block in _per_group(tensor, layout))
    return torch.cat([basis.T @ block for basis, block in zip(encode, blocks, strict=True)])


def _dtype_of(name: str, weights: AttentionWeights) -> torch.dtype:
    """That of the tensor which a new one replaces; without one that of its projection, or of the values."""
    if "_proj." not in name:
        return weights.v_weight.dtype
    side, kind = name[0], name.rpartition(".")[2]
    replaced: Tensor | None = getattr(weights, f"{side}_{kind}")
    return (getattr(weights, f"{side}_weight") if replaced is None else replaced).dtype


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    result = tensor.to(dtype).contiguous()
    if not result.is_meta and not torch.isfinite(result).all():
        raise NumericsError(
            f"{name}: not finite after the cast to {dtype} (largest magnitude {tensor.abs().max().item():.3g}).",
            "Convert the source checkpoint to bfloat16 or float32 and export again.",
        )
    return result
