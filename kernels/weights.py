"""Attention weights of a compressed layer in plain PyTorch: for caches that score tokens by the attention they draw."""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.format.layout import LayerLayout

from .reference import class_basis, class_mask, class_rotation, rotate
from .rows import key_columns, unpack_layer


def attention_weights(
    query: Tensor,
    key: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    scaling: float,
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    constant_key: Tensor | None = None,
    attention_mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The weights that `reference.grouped_attention` or `code_reference.coded_attention` give each key.

    Args:
        query, key and the rest: as there. Rows of codes give the weights exactly: what their means add to the logits of
            a query after RoPE is the same for all its keys.
    Returns:
        [batch_size, groups, query heads of a group, seq_len, kv_len], float32 or wider, groups and heads in the order
        of the layout; 0 where nothing may be attended to.
    """
    size, domain = layout.group_size, layout.domain
    seq_len = query.shape[1] if domain == "none" else query.shape[2]
    kv_len = key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    if layout.coded:
        key = unpack_layer(key, key_columns(layout), query.dtype)
    found, column = [], 0
    for cls in layout.classes():
        heads = slice(cls.start * size * heads_per_kv, (cls.start + cls.count) * size * heads_per_kv)
        columns = slice(cls.qk_offset, cls.qk_offset + cls.count * cls.qk_rank)
        latents = key[:, 0, :, columns].unflatten(-1, (cls.count, cls.qk_rank)).transpose(1, 2).to(dtype)
        if domain == "none":
            width = cls.count * size * heads_per_kv * cls.qk_rank
            packed = query[..., column : column + width].unflatten(-1, (cls.count, -1, cls.qk_rank))
            queries, column = packed.permute(0, 2, 3, 1, 4).to(dtype), column + width
            logits = queries @ latents.unsqueeze(2).mT
        else:
            assert query_basis is not None
            basis = class_basis(query_basis, cls).unflatten(1, (size, -1)).to(dtype)
            split = query[:, heads].to(dtype).unflatten(1, (cls.count, size, heads_per_kv))
            if domain == "post":
                projected = torch.einsum("bngpsd,ngdr->bngpsr", split, basis).flatten(2, 3)
                logits = projected @ latents.unsqueeze(2).mT
            else:
                assert key_rotation is not None
                keys = torch.einsum("bnlr,ngdr->bngld", latents, basis)
                if constant_key is not None:
                    constant = constant_key[cls.start * size : (cls.start + cls.count) * size]
                    keys = keys + constant.unflatten(0, (cls.count, size)).unsqueeze(2)
                keys = rotate(keys, *class_rotation(key_rotation, cls)).to(dtype)
                logits = (split @ keys.unsqueeze(3).mT).flatten(2, 3)
        logits = logits * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        own = class_mask(attention_mask, layout, heads, heads_per_kv)
        if own is None and seq_len > 1:
            own = torch.ones(seq_len, kv_len, dtype=torch.bool, device=logits.device).tril()[None, None]
        if own is not None:
            mask = own.unflatten(1, (1, 1) if own.shape[1] == 1 else logits.shape[1:3])
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        found.append(torch.softmax(logits, dim=-1).nan_to_num())
    return torch.cat(found, dim=1)
