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
    """Apply RoPE in transformers' layout (dimension i is paired with i + rotary_dim/2; the rest stays as it is).

    Args:
        x: [..., seq_len, head_dim].
        cos, sin: [..., seq_len, rotary_dim], broadcastable to the first rotary_dim dimensions of x.
    """
    rotary_dim = cos.shape[-1]
    turned = x[..., :rotary_dim]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], dim=-1)


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
    softcap: float | None = None,
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
        key_rotation: cos and sin [kv_len, rotary_dim], in domain `pre`.
        attention_mask: [batch_size, 1, seq_len, kv_len], bool (True: attend) or added to the logits; None is causal.
        softcap: bound that the logits are pressed below, before the mask; None for none.
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
        outputs.append(attend(queries, keys, values, scaling, attention_mask, dropout, softcap))
    return torch.cat(outputs, dim=-1)


def _class_rows(rows: Tensor, offset: int, count: int, rank: int) -> Tensor:
    """[batch_size, 1, kv_len, width] -> the latents of a class, [batch_size, count, kv_len, rank]; a view."""
    return rows[:, 0, :, offset : offset + count * rank].unflatten(-1, (count, rank)).transpose(1, 2)


def _class_basis(basis: Tensor, cls: GroupClass) -> Tensor:
    """[rows, qk_width] -> the bases of a class, [count, rows, rank]; a view."""
    columns = basis[:, cls.qk_offset : cls.qk_offset + cls.count * cls.qk_rank]
    return columns.unflatten(-1, (cls.count, cls.qk_rank)).transpose(0, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Scaled-dot-product attention of [batch_size, heads, ...] queries over as many or fewer key and value heads.

    Returns [batch_size, seq_len, heads * value width].
    """
    if softcap is not None:
        return _attend_softcapped(query, key, value, scaling, attention_mask, dropout, softcap)
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


def _attend_softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    attention_mask: Tensor | None,
    dropout: float,
    softcap: float,
) -> Tensor:
    """`attend` with logits pressed into (-softcap, softcap) before the mask, which torch's own function cannot do."""
    seq_len, kv_len = query.shape[2], key.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = query.unflatten(1, (key.shape[1], -1))  # [batch_size, kv heads, heads per kv, seq_len, width]
    logits = packed @ key.unsqueeze(2).mT * scaling
    logits = (logits / softcap).tanh() * softcap
    if attention_mask is None:
        attention_mask = torch.ones(seq_len, kv_len, dtype=torch.bool, device=query.device)
        if seq_len > 1:
            attention_mask = attention_mask.tril()
    elif attention_mask.dim() == 4:
        attention_mask = attention_mask.unsqueeze(2)
    if attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    else:
        logits = logits + attention_mask
    weights = logits.float().softmax(-1).to(value.dtype)
    output = functional.dropout(weights, dropout) @ value.unsqueeze(2)
    return output.flatten(1, 2).transpose(1, 2).flatten(2)
