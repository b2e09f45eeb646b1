"""Sums over queries of the attention weights that each key of a compressed layer draws, a block of them at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.parameters import AttentionParameters, masked, scaled_and_capped, seq_len_of
from ..kernels.reference import products
from ..kernels.rotary import Rotation

BLOCK_ELEMENTS_CPU = 1 << 20
BLOCK_ELEMENTS_GPU = 1 << 26
"""Logits of a block of queries."""


@dataclass(frozen=True)
class Softening:
    """What is done to logits before the softmax whose columns are summed: (logit + bias) / temperature.

    bias: of each key, [batch_size, 1 or groups, kv_len], groups in the order of the layout.
    """

    bias: Tensor | None = None
    temperature: float = 1.0

    @property
    def none(self) -> bool:
        """Whether the weights are those of attention itself."""
        return self.bias is None and self.temperature == 1.0


def column_sums(
    query: Tensor,
    key: Tensor,
    parameters: AttentionParameters,
    key_rotation: Rotation | None = None,
    attention_mask: Tensor | None = None,
    softening: Softening | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Of each key, the sum over queries of the weights that it draws, the mean over the query heads of its group.

    Args:
        query, key and the rest: as `reference.attention` takes them.
        counted: [batch_size, seq_len] bool; queries that are not (padding) add nothing.
    Returns:
        [batch_size, groups, kv_len], float32 or wider, groups in the order of the layout.
    Source: H2O (arXiv 2306.14048), algorithm 1.
    """
    softening = softening or Softening()
    dtype = torch.promote_types(query.dtype, torch.float32)
    seq_len, kv_len = seq_len_of(query), key.shape[2]
    if counted is None:
        counted = torch.ones(query.shape[0], seq_len, dtype=torch.bool, device=query.device)
    places, found = torch.arange(kv_len, device=query.device), []
    for cls in parameters.layout.classes(query.element_size()):
        queries, keys, extra = products(query, key, parameters, cls, key_rotation)
        batch_size, count, size, heads = queries.shape[:4]
        wide = keys.to(dtype).mT.unsqueeze(3)
        mask = parameters.mask(attention_mask, parameters.heads(cls))
        if mask is not None and mask.shape[1] > 1:
            mask = mask.unflatten(1, (count, size, heads))
        elif mask is not None:
            mask = mask[:, :, None, None]
        bias = softening.bias
        if bias is not None:
            bias = bias[:, cls.start : cls.start + cls.count] if bias.shape[1] > 1 else bias
            bias = bias[:, :, None, None, None]
        total = torch.zeros(batch_size, count, kv_len, dtype=dtype, device=query.device)
        budget = BLOCK_ELEMENTS_CPU if query.device.type == "cpu" else BLOCK_ELEMENTS_GPU
        block = max(1, budget // (batch_size * count * size * heads * kv_len))
        for start in range(0, seq_len, block):
            rows = slice(start, min(start + block, seq_len))
            logits = queries[..., rows, :].to(dtype) @ wide
            if extra is not None:
                logits = logits + extra[..., rows, :]
            logits = scaled_and_capped(logits, parameters.scaling, parameters.softcap)
            if mask is not None:
                logits = masked(logits, mask[..., rows if mask.shape[-2] > 1 else slice(None), :])
            elif seq_len > 1:
                logits = masked(logits, places <= places[rows, None])
            if bias is not None:
                logits = logits + bias
            weights = (logits / softening.temperature).softmax(-1).nan_to_num()
            total += (weights * counted[:, None, None, None, rows, None]).sum((2, 3, 4))
        found.append(total / (size * heads))
    return torch.cat(found, dim=1)
