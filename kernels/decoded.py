"""Attention of whole rows as decoding has it, in plain PyTorch: what accuracy is measured by.

Every token behind a prompt sees the newest tokens and the first ones exactly and the others through their codes, as if
it had come alone. One pass does it for all of them: codes with a running softmax over blocks of keys, exact keys for
one block of queries after another, both joined by their log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .exact import ExactKeys, exact_attention, join_rows
from .parameters import AttentionParameters
from .reference import Beyond, dense_attention, partial_attention
from .rotary import Rotation

QUERY_BLOCK = 128
"""Queries that read exact keys together. Each block reads as many keys, and those that are exact for its first one."""


def decoded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exact: tuple[Tensor, Tensor, Tensor],
    parameters: AttentionParameters,
    key_rotation: Rotation | None = None,
    attention_mask: Tensor | None = None,
    *,
    prompt: int = 1,
    begin: Tensor | None = None,
) -> Tensor:
    """Attention of all tokens of whole rows, of which those behind the prompt came one by one.

    Args:
        query, key, value, key_rotation, attention_mask: as in `reference.attention`, of the same tokens.
        exact: queries [batch_size, num_heads, seq_len, head_dim], keys and values [batch_size, num_kv_heads, seq_len,
            head_dim] as the model makes them, KV heads in the order of the layout.
        prompt: tokens that came at once, which see each other exactly. begin: [batch_size], index of each sequence's
            first real token; None: 0.
    Returns:
        [batch_size, seq_len, num_heads * head_dim], dtype of query, KV heads in the order of the layout.
    """
    tokens = parameters.layout.exact
    assert tokens is not None
    seq_len = exact[0].shape[2]
    prompt = min(prompt, seq_len)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(-1, -1, seq_len, seq_len)
    outputs = [_prompt(exact, prompt, attention_mask, parameters)]
    if prompt == seq_len:
        return outputs[0]
    if begin is None:
        begin = torch.zeros(1, dtype=torch.int64, device=query.device)
    is_first = torch.arange(seq_len, device=query.device) - begin[:, None] < tokens.first
    later = None if attention_mask is None else attention_mask[:, :, prompt:]
    beyond = Beyond(tokens.newest, is_first)
    rows = query[:, :, prompt:], key, value, parameters, key_rotation, later
    latents, of_rows = partial_attention(*rows, beyond=beyond)
    for start in range(prompt, seq_len, QUERY_BLOCK):
        queries = slice(start, min(start + QUERY_BLOCK, seq_len))
        keys = _exact_keys(exact, begin, attention_mask, queries, parameters)
        own = slice(queries.start - prompt, queries.stop - prompt)
        found = exact_attention(exact[0][:, :, queries], keys, parameters)
        outputs.append(join_rows(*found, latents[:, own], of_rows[:, own], parameters).to(query.dtype))
    return torch.cat(outputs, dim=1)


def _prompt(
    exact: tuple[Tensor, Tensor, Tensor], prompt: int, mask: Tensor | None, parameters: AttentionParameters
) -> Tensor:
    """Attention of the tokens of the prompt to each other."""
    own = parameters.mask(None if mask is None else mask[:, :, :prompt, :prompt], slice(None))
    query, key, value = (side[:, :, :prompt] for side in exact)
    return dense_attention(query, key, value, parameters.scaling, own, parameters.softcap, parameters.sinks)


def _exact_keys(
    exact: tuple[Tensor, Tensor, Tensor],
    begin: Tensor,
    mask: Tensor | None,
    queries: slice,
    parameters: AttentionParameters,
) -> ExactKeys:
    """What neighbouring queries see exactly: their newest keys, and the first of each sequence that are older."""
    tokens = parameters.layout.exact
    assert tokens is not None
    _, key, value = exact
    near = slice(max(0, queries.start - tokens.newest + 1), queries.stop)
    index = torch.arange(queries.stop, device=key.device)
    first = begin[:, None] + torch.arange(tokens.first, device=key.device)  # [batch_size or 1, first]
    age = index[queries, None] - index[near]
    is_new = ((age >= 0) & (age < tokens.newest)).expand(len(first), 1, -1, -1)
    is_old = (index[queries, None] - first[:, None] >= tokens.newest)[:, None]
    seen = torch.cat([is_old, is_new], dim=-1)  # [batch_size or 1, 1, queries, keys]
    place = first.clamp(max=key.shape[2] - 1)[:, None, :, None].expand(len(key), key.shape[1], -1, key.shape[3])
    keys, values = (torch.cat([side.gather(2, place), side[:, :, near]], dim=2) for side in (key, value))
    if mask is None:
        return ExactKeys(keys, values, seen)
    own = mask[:, :, queries].expand(len(key), -1, -1, -1)
    of_first = own.gather(-1, place[:, :1, None, :, 0].expand(*own.shape[:3], -1))
    shown = torch.cat([of_first, own[..., near]], dim=-1)
    return ExactKeys(keys, values, shown & seen if shown.dtype == torch.bool else shown.masked_fill(~seen, -torch.inf))
