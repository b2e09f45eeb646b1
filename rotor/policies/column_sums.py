"""Attention weights that each key of a compressed layer draws, summed over queries, a block of queries at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.parameters import AttentionParameters, masked, scaled_and_capped, seq_len_of
from ..kernels.reference.logits import products
from ..kernels.rotary import Rotation

BLOCK_ELEMENTS_CPU = 1 << 20
BLOCK_ELEMENTS_GPU = 1 << 26
"""Logits of a block of queries."""


class ScoreSoftmax(NamedTuple):
    """Logits become (logit + bias) / temperature before the softmax whose columns are summed.

    bias: of each key, [batch_size, 1 or groups, kv_len], groups in the order of the layout.
    """

    bias: Tensor
    temperature: float


def column_sums(
    query: Tensor,
    key: Tensor,
    parameters: AttentionParameters,
    key_rotation: Rotation | None,
    attention_mask: Tensor | None,
    score_softmax: ScoreSoftmax | None,
    counted: Tensor,
) -> Tensor:
    """Sum over queries of the attention weights that each key draws, averaged over the query heads of its group.

    Args:
        query, key and the rest: as `reference.attention` takes them.
        counted: [batch_size, seq_len] bool; other queries (padding) add nothing.
    Returns:
        [batch_size, groups, kv_len], float32 or wider, groups in the order of the layout.
    Source: H2O (arXiv 2306.14048), algorithm 1.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch_size, seq_len, kv_len = len(query), seq_len_of(query), key.shape[2]
    places, sums = torch.arange(kv_len, device=query.device), []
    for cls in parameters.layout.classes(query.element_size()):
        queries, keys, extra = products(query, key, parameters, cls, key_rotation)
        keys, heads = keys.to(dtype).mT.unsqueeze(3), queries.shape[2] * queries.shape[3]
        mask = parameters.mask(attention_mask, parameters.heads(cls))
        total = torch.zeros(batch_size, cls.count, kv_len, dtype=dtype, device=query.device)
        budget = BLOCK_ELEMENTS_CPU if query.device.type == "cpu" else BLOCK_ELEMENTS_GPU
        block = max(1, budget // (batch_size * cls.count * heads * kv_len))
        for start in range(0, seq_len, block):
            rows = slice(start, min(start + block, seq_len))
            logits = queries[..., rows, :].to(dtype) @ keys
            if extra is not None:
                logits = logits + extra[..., rows, :]
            logits = scaled_and_capped(logits, parameters.scaling, parameters.softcap).flatten(2, 3)
            if mask is not None:
                logits = masked(logits, mask[..., rows, :])
            elif seq_len > 1:
                logits = masked(logits, places <= places[rows, None])
            if score_softmax is not None:
                bias = score_softmax.bias
                bias = bias[:, cls.start : cls.start + cls.count] if bias.shape[1] > 1 else bias
                logits = (logits + bias[:, :, None, None]) / score_softmax.temperature
            total += (logits.softmax(-1).nan_to_num() * counted[:, None, None, rows, None]).sum((2, 3))
        sums.append(total / heads)
    return torch.cat(sums, dim=1)
