"""Attention over ragged groups of KV heads in plain PyTorch: the path on a CPU, and the truth for the kernels.

Packed rows hold the latents of all groups of a layer side by side. Groups of equal ranks (a class) are batched into one
scaled-dot-product attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rotor.layout import GroupClass, LayerLayout


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE in transformers' layout (dimension i is paired with i + d/2).

    Args:
        x: [..., seq_len, head_dim].
        cos, sin: broadcastable to x.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def project_keys(key: Tensor, key_basis: Tensor, layout: LayerLayout) -> Tensor:
    """Keys into their packed rows.

    Args:
        key: [batch_size, num_kv_heads, seq_len, head_dim], heads in the order of the layout.
        key_basis: [group_size * head_dim, qk_width].
    Returns:
        [batch_size, 1, seq_len, qk_width].
    """
    batch_size, _, seq_len, head_dim = key.shape
    size = layout.group_size
    stacked = key.reshape(batch_size, -1, size, seq_len, head_dim).permute(0, 3, 1, 2, 4).flatten(3)
    rows = []
    for cls in layout.classes():
        basis = _class_basis(key_basis, cls)
        keys = stacked[:, :, cls.start : cls.start + cls.count]
        rows.append(torch.einsum("bsnd,ndr->bsnr", keys, basis).flatten(2))
    return torch.cat(rows, dim=-1).unsqueeze(1)


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    scaling: float,
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of all query heads over the packed rows of a layer.

    post: queries are projected by `query_basis` and multiplied with the key latents; nothing is rebuilt.
    pre: keys of each KV head are rebuilt by `query_basis` and rotated by `key_rotation`; queries come rotated.
    none: queries come projected.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in domain
            `none` [batch_size, seq_len, sum over query heads of qk_rank].
        key, value: [batch_size, 1, kv_len, qk_width] and [batch_size, 1, kv_len, v_width].
        heads_per_kv: query heads per KV head.
        scaling: factor on the logits; the one of the uncompressed model.
        query_basis: [group_size * head_dim, qk_width], except in domain `none`.
        key_rotation: cos and sin [kv_len, head_dim], in domain `pre`.
        attention_mask: [batch_size, 1, seq_len, kv_len], bool (True: attend) or added to the logits; None is causal.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank], groups in the order of the layout.
    Source: DESIGN sections 1 and 4; FDC section 4.1 for `post`, Palu for `pre`.
    """
    outputs = []
    size = layout.group_size
    batch_size, kv_len = key.shape[0], key.shape[2]
    folded_offset = 0
    for cls in layout.classes():
        heads = slice(cls.start * size * heads_per_kv, (cls.start + cls.count) * size * heads_per_kv)
        latents = _class_rows(key, cls.qk_offset, cls.count, cls.qk_rank)
        values = _class_rows(value, cls.v_offset, cls.count, cls.v_rank)
        if layout.domain == "none":
            width = cls.count * size * heads_per_kv * cls.qk_rank
            packed = query[..., folded_offset : folded_offset + width]
            folded_offset += width
            queries = packed.unflatten(-1, (-1, cls.qk_rank)).transpose(1, 2)
            keys = latents
        else:
            assert query_basis is not None
            queries = query[:, heads]
            basis = _class_basis(query_basis, cls).unflatten(1, (size, -1))  # [count, size, head_dim, rank]
            if layout.domain == "post":
                split = queries.unflatten(1, (cls.count, size, heads_per_kv))
                queries = torch.einsum("bngpsd,ngdr->bngpsr", split, basis).flatten(1, 3)
                keys = latents
            else:
                assert key_rotation is not None
                rebuilt = torch.einsum("bnlr,ngdr->bngld", latents, basis)
                keys = rotate(rebuilt, *key_rotation).flatten(1, 2)
                values = values.unsqueeze(2).expand(-1, -1, size, -1, -1).reshape(batch_size, -1, kv_len, cls.v_rank)
        outputs.append(_attend(queries, keys, values, scaling, attention_mask, dropout))
    return torch.cat(outputs, dim=-1)


def _class_rows(rows: Tensor, offset: int, count: int, rank: int) -> Tensor:
    """[batch_size, 1, kv_len, width] -> the latents of a class, [batch_size, count, kv_len, rank]; a view."""
    return rows[:, 0, :, offset : offset + count * rank].unflatten(-1, (count, rank)).transpose(1, 2)


def _class_basis(basis: Tensor, cls: GroupClass) -> Tensor:
    """[rows, qk_width] -> the bases of a class, [count, rows, rank]; a view."""
    columns = basis[:, cls.qk_offset : cls.qk_offset + cls.count * cls.qk_rank]
    return columns.unflatten(-1, (cls.count, cls.qk_rank)).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, attention_mask: Tensor | None, dropout: float
) -> Tensor:
    """Scaled-dot-product attention of [batch_size, heads, ...] queries over fewer key and value heads.

    Returns [batch_size, seq_len, heads * value width].
    """
    seq_len, kv_len = query.shape[2], key.shape[2]
    if seq_len == 1 and (attention_mask is None or attention_mask.shape[1] == 1):
        # Decoding: the query heads that share keys become the rows of one matrix product.
        packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        output = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
        return output.reshape(output.shape[0], 1, -1)
    is_causal = attention_mask is None and seq_len > 1
    if is_causal and kv_len > seq_len:
        # A prefill into an empty static cache: nothing attends behind the new keys, so leave that part out.
        key, value = key[:, :, :seq_len], value[:, :, :seq_len]
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(2)
