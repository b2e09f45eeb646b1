"""Attention over ragged groups of KV heads in plain PyTorch: the path on a CPU and wherever a kernel does not fit.

Packed rows hold the latents of all groups of a layer side by side. Groups of equal ranks (a class) are batched into one
scaled-dot-product attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rotor.format.layout import LayerLayout

from .decode_reference import decode_class, serves
from .parameters import AttentionParameters, class_basis, class_rotation, masked, pressed, seq_len_of

REBUILT_ELEMENTS_CPU = 1 << 18
REBUILT_ELEMENTS_GPU = 1 << 26
"""Elements of rebuilt keys at a time while decoding: what a core's cache holds, and few launches on a GPU."""


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


def project_keys(
    key: Tensor,
    key_basis: Tensor,
    layout: LayerLayout,
    shift: Tensor | None = None,
    of_values: Tensor | None = None,
) -> Tensor:
    """Keys into their latents, side by side.

    Args:
        key: [batch_size, num_kv_heads, seq_len, head_dim], heads in the order of the layout.
        key_basis: [group_size * head_dim, qk_width].
        shift: [qk_width], float32, added before the only rounding: it may be far larger than the sum.
        of_values: [batch_size, 1, seq_len, qk_width], the values' part of latents that keys share with them.
    Returns:
        [batch_size, 1, seq_len, qk_width], dtype of `key`.
    """
    dtype = key.dtype
    if shift is not None:
        wide = torch.promote_types(dtype, shift.dtype)
        key, key_basis = key.to(wide), key_basis.to(wide)
    batch_size, _, seq_len, head_dim = key.shape
    size = layout.group_size
    stacked = key.reshape(batch_size, -1, size, seq_len, head_dim).permute(0, 3, 1, 2, 4).flatten(3)
    rows = []
    for cls in layout.classes():
        basis = class_basis(key_basis, cls)
        keys = stacked[:, :, cls.start : cls.start + cls.count]
        rows.append(torch.einsum("bsnd,ndr->bsnr", keys, basis).flatten(2))
    latents = torch.cat(rows, dim=-1).unsqueeze(1)
    if of_values is not None:
        latents = latents + of_values
    return latents if shift is None else (latents + shift).to(dtype)


def project_queries(query: Tensor, query_basis: Tensor, layout: LayerLayout, heads_per_kv: int) -> Tensor:
    """Queries of domain `post` into the latents of their groups, side by side, as those of domain `none` come.

    Args:
        query: [tokens, num_heads, head_dim], rotated, KV heads in the order of the layout.
        query_basis: [group_size * head_dim, qk_width].
    Returns:
        [tokens, sum over query heads of qk_rank], dtype of `query`.
    """
    size, rows = layout.group_size, []
    heads = query.unflatten(1, (len(layout.groups), size, heads_per_kv))
    for cls in layout.classes():
        basis = class_basis(query_basis, cls).unflatten(1, (size, -1))  # [count, size, head_dim, rank]
        own = heads[:, cls.start : cls.start + cls.count]
        rows.append(torch.einsum("tngpd,ngdr->tngpr", own, basis).flatten(1))
    return torch.cat(rows, dim=-1)


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of all query heads over the packed rows of a layer.

    post: queries are projected by the query basis and multiplied with the key latents; nothing is rebuilt.
    pre: keys of each KV head are rebuilt by the query basis and rotated by `key_rotation`; queries come rotated.
    none: queries come projected.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in domain
            `none` [batch_size, seq_len, sum over query heads of qk_rank].
        key, value: [batch_size, 1, kv_len, qk_width] and [batch_size, 1, kv_len, v_width].
        key_rotation: cos and sin [kv_len, rotary_dim], in domain `pre`; or of places that differ, [batch_size, 1 or
            groups, kv_len, rotary_dim].
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len], heads in the order of the
            uncompressed model; bool (True: attend) or added to the logits; None is causal.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank], groups in the order of the layout.
    Source: FDC section 4.1 for `post`, Palu for `pre`; docs/design.md.
    """
    outputs = []
    layout, scaling, softcap = parameters.layout, parameters.scaling, parameters.softcap
    rebuilt = layout.domain == "pre"
    one_rebuilt = rebuilt and seq_len_of(query) == 1 and dropout == 0.0
    for cls in layout.classes():
        mask = parameters.mask(attention_mask, parameters.heads(cls))
        queries = parameters.queries(query, cls)
        keys = _class_rows(key, cls.qk_offset, cls.count, cls.qk_rank)
        values = _class_rows(parameters.value_rows(key, value), cls.v_offset, cls.count, cls.v_rank)
        if not rebuilt:
            outputs.append(attend(queries.flatten(1, 2), keys, values, scaling, mask, dropout, softcap))
            continue
        assert key_rotation is not None
        basis, rotation = parameters.basis(cls), class_rotation(key_rotation, cls)
        if one_rebuilt and key_rotation[0].dim() == 2 and serves(query, key, value, parameters.query_basis):
            rows = keys.transpose(1, 2), values.transpose(1, 2)
            outputs.append(decode_class(queries, *rows, (None, None), parameters, cls, mask, key_rotation))
        elif one_rebuilt:
            logits = _rebuilt_logits(queries, keys, basis, rotation)
            outputs.append(_softmax_attention(logits, values, scaling, mask, softcap))
        else:
            keys = rotate(torch.einsum("bnlr,ngdr->bngld", keys, basis), *rotation).flatten(1, 2)
            values = values.repeat_interleave(layout.group_size, dim=1)
            outputs.append(attend(queries.flatten(1, 2), keys, values, scaling, mask, dropout, softcap))
    return torch.cat(outputs, dim=-1)


def _class_rows(rows: Tensor, offset: int, count: int, rank: int) -> Tensor:
    """[batch_size, 1, kv_len, width] -> the latents of a class, [batch_size, count, kv_len, rank]; a view."""
    return rows[:, 0, :, offset : offset + count * rank].unflatten(-1, (count, rank)).transpose(1, 2)


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
    seq_len, kv_len = query.shape[2], key.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling  # of the width before it is padded below
    is_causal = False
    if attention_mask is None and seq_len > 1:  # a branch, since torch.compile would make the condition symbolic
        is_causal = True
    if is_causal and kv_len > seq_len:
        # A prefill into an empty static cache: nothing attends behind the new keys, so leave that part out.
        key, value = key[:, :, :seq_len], value[:, :, :seq_len]
    if softcap is not None:
        logits = query.unflatten(1, (key.shape[1], -1)).float() @ key.unsqueeze(2).mT.float()
        if is_causal:
            attention_mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=query.device).tril()[None, None]
        return _softmax_attention(logits, value, scaling, attention_mask, softcap, dropout)
    if seq_len == 1 and (attention_mask is None or attention_mask.shape[1] == 1):
        # Decoding: the query heads that share keys become the rows of one matrix product.
        packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        output = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
        return output.reshape(output.shape[0], 1, -1)
    v_width = value.shape[-1]
    width = max(query.shape[-1], v_width)
    if seq_len > 1 and query.shape[-1] != v_width:
        # PyTorch's fused kernels want equal widths; without them it stores all logits, and takes three times as long.
        query, key, value = (functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
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
    return output[..., :v_width].transpose(1, 2).flatten(2)


def _rebuilt_logits(query: Tensor, latents: Tensor, basis: Tensor, key_rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Unscaled logits of one query position against keys rebuilt block by block, so that a block stays in the cache.

    Args:
        query: [batch_size, count, heads of a group, 1, head_dim].
        latents: [batch_size, count, kv_len, qk_rank].
        basis: [count, size, head_dim, qk_rank].
        key_rotation: cos and sin [..., kv_len, head_dim].
    Returns:
        [batch_size, count, heads of a group, 1, kv_len], float32 or wider.
    """
    count, size, head_dim, _ = basis.shape
    batch_size, _, kv_len, _ = latents.shape
    queries = query.squeeze(3).unflatten(2, (size, -1))
    dtype = torch.promote_types(query.dtype, torch.float32)
    queries = queries.to(dtype)
    elements = REBUILT_ELEMENTS_CPU if query.device.type == "cpu" else REBUILT_ELEMENTS_GPU
    block = max(16, elements // (batch_size * count * size * head_dim))
    blocks = []
    for start in range(0, kv_len, block):
        end = min(start + block, kv_len)
        keys = latents[:, :, None, start:end] @ basis.mT
        keys = rotate(keys, *(table[..., start:end, :] for table in key_rotation)).to(dtype)
        blocks.append(queries @ keys.mT)
    return torch.cat(blocks, dim=-1).flatten(2, 3).unsqueeze(3)


def _softmax_attention(
    logits: Tensor,
    value: Tensor,
    scaling: float,
    attention_mask: Tensor | None,
    softcap: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax and value product for logits [batch_size, count, heads of a group, seq_len, kv_len], unscaled.

    `value` is [batch_size, count, kv_len, v_rank]. Returns [batch_size, seq_len, heads * v_rank].
    """
    logits = masked(pressed(logits, scaling, softcap), attention_mask)
    # A query that may attend to nothing (padding) gives zeros, as in scaled_dot_product_attention.
    probabilities = torch.softmax(logits, dim=-1).nan_to_num().to(value.dtype)
    probabilities = functional.dropout(probabilities, dropout)
    heads, seq_len = logits.shape[2], logits.shape[3]
    output = (probabilities.flatten(2, 3) @ value).unflatten(2, (heads, seq_len))
    return output.permute(0, 3, 1, 2, 4).flatten(2)
