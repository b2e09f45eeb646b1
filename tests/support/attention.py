"""Attention of whole rows with two kinds of keys, written out for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.checkpoint.layout import ExactTokens


def attention_to_two_kinds(
    query: Tensor,
    exact: tuple[Tensor, Tensor],
    coded: tuple[Tensor, Tensor],
    tokens: ExactTokens,
    scaling: float,
    mask: Tensor | None = None,
    *,
    share: float,
) -> Tensor:
    """Attend to the newest and first tokens by `exact` and to the others by `coded`, one softmax over both.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim]. exact, coded: keys and values, [batch_size, num_kv_heads,
            seq_len, head_dim]. mask: bool (True: attend) or None, which is causal. share: of `coded` in exact ones.
    Returns:
        [batch_size, seq_len, num_heads * head_dim].
    """
    seq_len, count = query.shape[2], query.shape[1] // exact[0].shape[1]
    (key, value), (old_key, old_value) = ([x.repeat_interleave(count, 1) for x in side] for side in (exact, coded))
    key, value = (1 - share) * key + share * old_key, (1 - share) * value + share * old_value
    index = torch.arange(seq_len)
    age = index[:, None] - index
    is_exact = (age < tokens.newest) | (index < tokens.first)
    logits = torch.where(is_exact, query @ key.mT, query @ old_key.mT) * scaling
    seen = age >= 0 if mask is None else mask
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    output = (weights * is_exact) @ value + (weights * ~is_exact) @ old_value
    return output.transpose(1, 2).flatten(2)
