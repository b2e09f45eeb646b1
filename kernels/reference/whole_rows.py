"""Attention of whole rows as decoding has it, in plain PyTorch: what accuracy is measured by.

Every token behind a prompt sees the newest tokens and the first ones exactly and the others through their codes, as if
it had come alone. Codes are expanded to keys and values once; then one block of queries after another meets those that
are old for it and the exact ones side by side, under one mask and one softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..parameters import AttentionParameters
from ..rotary import Rotation
from .attention import dense_attention
from .logits import ClassRows

QUERY_BLOCK = 128
"""Queries that read keys together. Each block reads as many keys, and those that are exact for its first one."""


def decoded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exact: tuple[Tensor, Tensor],
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
        exact: keys and values as the model makes them, [batch_size, num_kv_heads, seq_len, head_dim], KV heads in the
            order of the layout; keys rotated as queries are.
        prompt: tokens that came at once, which see each other exactly. begin: [batch_size], index of each sequence's
            first real token; None: 0.
    Returns:
        [batch_size, seq_len, num_heads * head_dim], dtype of query, KV heads in the order of the layout.
    """
    tokens = parameters.layout.exact
    assert tokens is not None
    exact_key, exact_value = exact
    seq_len = exact_key.shape[2]
    prompt = min(prompt, seq_len)
    mask = parameters.mask(attention_mask, slice(None))
    if mask is not None:
        mask = mask.expand(-1, -1, seq_len, seq_len)
    given = slice(0, prompt)
    prompt_mask = None if mask is None else mask[:, :, given, given]
    outputs = [_attend(query[:, :, given], exact_key[:, :, given], exact_value[:, :, given], parameters, prompt_mask)]
    if prompt == seq_len:
        return outputs[0]
    coded_key, coded_value = _expanded(key, value, parameters, key_rotation, query.dtype)
    if begin is None:
        begin = torch.zeros(1, dtype=torch.int64, device=query.device)
    index = torch.arange(seq_len, device=query.device).expand(len(begin), -1)
    first = begin[:, None] + torch.arange(tokens.first, device=query.device)
    place = first.clamp(max=seq_len - 1)
    first_key, first_value = (_tokens(side, place) for side in (exact_key, exact_value))
    for start in range(prompt, seq_len, QUERY_BLOCK):
        queries = slice(start, min(start + QUERY_BLOCK, seq_len))
        old = slice(0, max(0, queries.stop - tokens.newest))
        near = slice(max(0, start - tokens.newest + 1), queries.stop)
        at = index[:, queries, None]
        is_coded = ~tokens.is_exact(at, index[:, None, old], begin[:, None, None])
        is_first = ~tokens.is_newest(at, first[:, None])
        is_near = (index[:, None, near] <= at) & tokens.is_newest(at, index[:, None, near])
        seen = torch.cat([is_coded, is_first, is_near], dim=-1)[:, None]
        if mask is not None:
            columns = torch.cat([index[:, old], place, index[:, near]], dim=-1)
            shown = _columns(mask[:, :, queries], columns)
            seen = shown & seen if shown.dtype == torch.bool else shown.masked_fill(~seen, -torch.inf)
        keys = torch.cat([coded_key[:, :, old], first_key, exact_key[:, :, near]], dim=2)
        values = torch.cat([coded_value[:, :, old], first_value, exact_value[:, :, near]], dim=2)
        outputs.append(_attend(query[:, :, queries], keys, values, parameters, seen))
    return torch.cat(outputs, dim=1)


def _attend(query: Tensor, key: Tensor, value: Tensor, parameters: AttentionParameters, mask: Tensor | None) -> Tensor:
    return dense_attention(query, key, value, parameters.scaling, mask, parameters.softcap, parameters.sinks)


def _tokens(side: Tensor, place: Tensor) -> Tensor:
    """Some tokens of keys or values [batch_size, heads, seq_len, head_dim], by places [batch_size or 1, n]."""
    index = place[:, None, :, None].expand(len(side), side.shape[1], -1, side.shape[3])
    return side.gather(2, index)


def _columns(mask: Tensor, place: Tensor) -> Tensor:
    """Some columns of a mask [batch_size or 1, heads or 1, queries, seq_len], by places [batch_size or 1, n]."""
    batch_size = max(len(mask), len(place))
    index = place[:, None, None].expand(batch_size, *mask.shape[1:3], -1)
    return mask.expand(batch_size, -1, -1, -1).gather(-1, index)


def _expanded(
    key: Tensor, value: Tensor, parameters: AttentionParameters, rotation: Rotation | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys after RoPE and values of each head that rows are read as, [batch_size, num_kv_heads, seq_len, head_dim]."""
    keys, values = [], []
    classes = parameters.layout.classes(dtype.itemsize)
    for cls, basis in zip(classes, parameters.output_bases(), strict=True):
        side = ClassRows.of(parameters, cls, key, value, dtype)
        keys.append(side.keys(slice(None), rotation).flatten(1, 2))
        latents = side.values(slice(None))
        values.append(torch.einsum("bnlw,ngdw->bngld", latents, basis.to(latents.dtype)).flatten(1, 2))
    whole = torch.cat(values, dim=1)
    if parameters.value_constant is not None:
        whole = whole + parameters.value_constant[:, None]
    return torch.cat(keys, dim=1), whole.to(dtype)
