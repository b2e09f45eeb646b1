"""Attention weights of a compressed layer in plain PyTorch: for caches that score tokens by the attention they draw."""

from __future__ import annotations

import torch
from torch import Tensor

from .parameters import AttentionParameters, class_rotation, masked, pressed, seq_len_of
from .reference import rotate
from .rows import key_columns, unpack_layer


def attention_weights(
    query: Tensor,
    key: Tensor,
    parameters: AttentionParameters,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The weights that `reference.grouped_attention` or `code_reference.coded_attention` give each key.

    Args:
        query, key and the rest: as there. Rows of codes give the weights exactly: what their means add to the logits of
            a query after RoPE is the same for all its keys.
    Returns:
        [batch_size, groups, query heads of a group, seq_len, kv_len], float32 or wider, groups and heads in the order
        of the layout; 0 where nothing may be attended to.
    """
    layout = parameters.layout
    seq_len, kv_len = seq_len_of(query), key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    if layout.coded:
        key = unpack_layer(key, key_columns(layout), query.dtype)
    query, found = query.to(dtype), []
    for cls in layout.classes():
        columns = slice(cls.qk_offset, cls.qk_offset + cls.count * cls.qk_rank)
        latents = key[:, 0, :, columns].unflatten(-1, (cls.count, cls.qk_rank)).transpose(1, 2).to(dtype)
        queries = parameters.queries(query, cls)
        if layout.domain == "pre":
            assert key_rotation is not None
            keys = torch.einsum("bnlr,ngdr->bngld", latents, parameters.basis(cls).to(dtype))
            if (constant := parameters.constant(cls)) is not None:
                keys = keys + constant.unsqueeze(2)
            keys = rotate(keys, *class_rotation(key_rotation, cls)).to(dtype)
            products = (queries.unflatten(2, (layout.group_size, -1)) @ keys.unsqueeze(3).mT).flatten(2, 3)
        else:
            products = queries @ latents.unsqueeze(2).mT
        mask = parameters.mask(attention_mask, parameters.heads(cls))
        if mask is None and seq_len > 1:
            mask = torch.ones(seq_len, kv_len, dtype=torch.bool, device=query.device).tril()[None, None]
        logits = masked(pressed(products, parameters.scaling, parameters.softcap), mask)
        found.append(torch.softmax(logits, dim=-1).nan_to_num())
    return torch.cat(found, dim=1)
