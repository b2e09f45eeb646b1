"""Rewrite the projections of an attention layer for a layout: rotate, truncate, reorder, fold.

All products are float64; each tensor is cast exactly once, to the dtype of the tensor that it replaces.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..bases.layer import LayerBases
from ..codes.fold import FoldedCode, fold_code
from ..codes.layer import CodedBases
from ..errors import NumericsError
from ..format.layout import AttentionShape, GroupLayout, LayerLayout, LayerRanks, folds_keys, ordered_by_class
from ..numerics import one_thread
from ..runtime.attention import FLOAT32
from ..runtime.families import AttentionWeights

RIDGE = 1e-6
"""Share of the mean latent energy added in the least-squares refit of W_o."""


def layer_layout(bases: LayerBases, ranks: LayerRanks, has_key_norm: bool) -> tuple[LayerLayout, tuple[int, ...]]:
    """Lay out a layer at given ranks.

    Args:
        ranks: (qk_rank, v_rank) of each group in the order of the bases; of coded ones, what their columns count.
        has_key_norm: a norm between k_proj and RoPE, which keeps the key basis out of W_k.
    Returns:
        The layout (groups ordered by class), and for each position the index of its group in `bases`.
    """
    size, domain = bases.group_size, bases.domain
    planes: list[list[int]] = [[] for _ in ranks]
    if bases.planes is not None and not has_key_norm:
        planes, domain = bases.planes.tolist(), "none"  # RoPE commutes with them: all is folded
    heads = [tuple(range(i * size, (i + 1) * size)) for i in range(len(ranks))]
    if isinstance(bases, CodedBases):
        groups = [GroupLayout.coded(own, *columns) for own, columns in zip(heads, bases.columns, strict=True)]
    else:
        groups = [
            GroupLayout(heads[i], qk_rank, v_rank, tuple(planes[i][: qk_rank // 2]), joint=bases.joint)
            for i, (qk_rank, v_rank) in enumerate(ranks)
        ]
    return ordered_by_class(domain, folds_keys(domain, has_key_norm, bases.rope_block), groups, bases.rope_block)


def rewrite_layer(
    weights: AttentionWeights,
    bases: LayerBases,
    layout: LayerLayout,
    order: tuple[int, ...],
    shape: AttentionShape,
) -> dict[str, Tensor]:
    """Rewrite the projections of one layer; they come by their names under the attention module.

    `q_proj` [num_heads * head_dim, hidden] with heads in the order of the layout (without RoPE: rotated and truncated,
    [sum over query heads of qk_rank, hidden]); `k_proj` likewise, or [qk_width, hidden] if the key basis is folded;
    `v_proj` [v_width, hidden], none where latents are joint and k_proj puts them out; `o_proj` [hidden, sum over query
    heads of v_rank]. `key_basis` [g * head_dim, qk_width] where keys are projected at run time; `query_basis`, of the
    same shape, where queries are or keys are rebuilt.

    Of coded bases, all that puts out a column of codes is divided by its step and shifted by its mean (`key_shift`
    [qk_width], float32, where keys are projected at run time), all that reads one is multiplied by the step. What
    rebuilt keys lack then is `key_constant` [num_kv_heads, head_dim], float32; what the values lack is in o_proj's
    bias.

    Args:
        layout, order: from `layer_layout`.
    Raises:
        NumericsError: a result overflows the dtype or is not finite; names it.
    Source: FDC section 5.1 for queries and keys, ZACK section 5.1 for the folding of W_v and W_o; docs/design.md.
    """
    keys, values = _folded_codes(bases, order, weights.v_weight.device)
    if keys:
        qk_encode, qk_decode = [code.encode for code in keys], [code.decode for code in keys]
        v_encode, v_decode = [code.encode for code in values], [code.decode for code in values]
    else:
        qk_encode, qk_decode, v_encode, v_decode = _truncated(bases, layout, order)
    heads = torch.tensor(layout.kv_head_order)
    tensors: dict[str, Tensor | None] = {}
    for kind in ("weight", "bias"):
        q, k, v = (_by_kv_head(getattr(weights, f"{p}_{kind}"), heads, shape) for p in "qkv")
        if layout.domain == "none" and q is not None:
            q_latents = _per_group(q.to(torch.float64), layout)
            parts = [
                torch.einsum("gdr,gpd...->gpr...", _by_head(decode, layout), block).flatten(0, 2)
                for decode, block in zip(qk_decode, q_latents, strict=True)
            ]
            tensors[f"q_proj.{kind}"] = torch.cat(parts)
        else:
            tensors[f"q_proj.{kind}"] = None if q is None else q.flatten(0, 2)
        of_keys = _fold(k, qk_encode, layout) if layout.folded_keys else _flatten_kv(k)
        of_values = _fold(v, v_encode, layout)
        if layout.joint and layout.folded_keys:
            of_keys, of_values = _sum(of_keys, of_values), None
        tensors[f"k_proj.{kind}"], tensors[f"v_proj.{kind}"] = of_keys, of_values

    columns = _by_kv_head(weights.o_weight.T, heads, shape)
    assert columns is not None
    readers = [_by_head(d, layout).unsqueeze(1) for d in v_decode]
    if bases.outputs is not None:
        outputs = bases.outputs.unflatten(0, (-1, layout.group_size, shape.heads_per_kv))
        ordered = (outputs[i] for i in order)  # one at a time: they are by far the largest
        readers = [_refit(*parts) for parts in zip(readers, v_encode, v_decode, ordered, strict=True)]
    tensors["o_proj.weight"] = torch.cat(
        [
            (reader.mT @ block.to(torch.float64)).flatten(0, 2)
            for reader, block in zip(readers, _per_group(columns, layout), strict=True)
        ]
    ).T
    tensors["o_proj.bias"] = weights.o_bias
    if not layout.folded_keys:
        tensors["key_basis"] = torch.cat(qk_encode, dim=-1)
    if layout.domain != "none":
        tensors["query_basis"] = torch.cat(qk_decode, dim=-1)
    if keys:
        before = tensors["k_proj.bias"]
        if layout.folded_keys:
            tensors["k_proj.bias"], keys = _shifted(before, keys, weights.k_weight.dtype)
        else:
            tensors["key_shift"] = torch.cat([code.shift for code in keys])
        if layout.joint and layout.folded_keys:
            _, values = _shifted(before, values, weights.k_weight.dtype)
        elif not layout.joint:
            tensors["v_proj.bias"], values = _shifted(tensors["v_proj.bias"], values, weights.v_weight.dtype)
        if layout.domain == "pre":
            tensors["key_constant"] = torch.cat([code.constant for code in keys]).unflatten(0, (-1, shape.head_dim))
        refitted = bases.outputs is not None  # then the readers have taken the means of what was dropped into account
        constants = [
            reader @ code.offset + (0 if refitted else code.dropped.unflatten(0, (layout.group_size, 1, -1)))
            for reader, code in zip(readers, values, strict=True)
        ]
        tensors["o_proj.bias"] = sum(
            (
                (constant.unsqueeze(-1) * block.to(torch.float64)).sum((0, 1, 2))
                for constant, block in zip(constants, _per_group(columns, layout), strict=True)
            ),
            torch.zeros(shape.hidden_size, dtype=torch.float64, device=columns.device)
            if weights.o_bias is None
            else weights.o_bias.to(torch.float64),
        )
    return {
        name: _cast(tensor, _dtype_of(name, weights), weights.prefix + name)
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _folded_codes(
    bases: LayerBases, order: tuple[int, ...], device: torch.device
) -> tuple[list[FoldedCode], list[FoldedCode]]:
    """The codes of keys and of values of each group in the order of the layout, folded; none of bases without codes."""
    if not isinstance(bases, CodedBases):
        return [], []
    sides = ((bases.qk, bases.key_codes), (bases.vo, bases.value_codes))
    keys, values = (
        [fold_code(pair.encode[i], pair.decode[i], codes[i]).to(device) for i in order] for pair, codes in sides
    )
    return keys, values


def _shifted(bias: Tensor | None, codes: list[FoldedCode], dtype: torch.dtype) -> tuple[Tensor, list[FoldedCode]]:
    """The bias of a projection into codes, as it is in its dtype, and the codes with what that rounding moved.

    Means are many steps large: a bias of 16 bits may be off by a good part of one, the same for every token. What reads
    the codes takes it into account.
    """
    exact = torch.cat([code.shift for code in codes])
    exact = exact if bias is None else exact + bias
    rounded = exact.to(dtype).to(exact.dtype)
    moved = (rounded - exact).split([len(code.shift) for code in codes])
    return rounded, [replace(code, offset=code.offset - part) for code, part in zip(codes, moved, strict=True)]


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
    """(qk encode, qk decode, v encode, v decode): a list of [g * head_dim, rank] in the order of the layout."""
    qk_ranks, v_ranks = [g.qk_rank for g in layout.groups], [g.v_rank for g in layout.groups]

    def columns(basis: Tensor, ranks: list[int]) -> list[Tensor]:
        return [basis[i, :, :rank] for i, rank in zip(order, ranks, strict=True)]

    return (
        columns(bases.qk.encode, qk_ranks),
        columns(bases.qk.decode, qk_ranks),
        columns(bases.vo.encode, v_ranks),
        columns(bases.vo.decode, v_ranks),
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
    """That of the tensor which a new one replaces; what replaces none takes that of its projection, or of the values.

    Some are added before anything is rounded, and stay in float32.
    """
    if name in FLOAT32:
        return torch.float32
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
