"""Attention over rows in pages in plain PyTorch: a serving engine's path on a CPU and wherever a kernel does not fit."""

from __future__ import annotations

import torch
from torch import Tensor

from .parameters import AttentionParameters
from .reference import partial_attention
from .rotary import Rotation, when_read


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    block_table: Tensor,
    kv_lens: Tensor,
    longest: int,
    *,
    rotation: Rotation | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over its pages, which hold these tokens' own rows already.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, or absorbed [batch_size, seq_len, sum over query
            heads of width], as in `reference.attention`. All sequences have seq_len new tokens.
        key, value: pages of rows, [num_pages, page_size, bytes] uint8 or of numbers [.., width]; views of any strides.
        block_table: [batch_size, pages of a sequence], integers.
        kv_lens: [batch_size]: tokens of each sequence, the new ones among them.
        longest: at least the largest of these, known to the host.
        rotation: of layers in blocks: RoPE's cos and sin by position, [positions, rotary_dim].
        window: a query attends to itself and the window - 1 keys before it.
    Returns:
        [batch_size, seq_len, sum over query heads of value width] in query's dtype.
    """
    page_size, seq_len = key.shape[1], query.shape[1 if query.dim() == 3 else 2]
    kv_lens = kv_lens.long()
    position = kv_lens[:, None] - seq_len + torch.arange(seq_len, device=query.device)  # of the queries
    span, first_page = longest, torch.zeros_like(kv_lens)
    if window is not None:
        first_page = (position[:, 0] - window + 1).clamp(min=0) // page_size
        span = min(longest, window + seq_len + page_size)
    places = first_page[:, None] * page_size + torch.arange(span, device=query.device)  # of the keys
    index = (places // page_size).clamp(max=block_table.shape[1] - 1)
    pages = block_table.gather(1, index).long()
    stored = places < kv_lens[:, None]

    def gathered(rows: Tensor) -> Tensor:
        """[num_pages, page_size, bytes] -> [batch_size, 1, span, bytes]; zeros where pages hold anything, NaN too."""
        found = rows[pages, places % page_size]
        return found.masked_fill_(~stored[..., None], 0).unsqueeze(1)

    seen = places[:, None] <= position[..., None]
    if window is not None:
        seen &= places[:, None] > position[..., None] - window
    key_rotation = None
    if rotation is not None:
        cos, sin = when_read(rotation, parameters.layout.form, places.clamp(max=len(rotation[0]) - 1))
        key_rotation = cos.unsqueeze(1), sin.unsqueeze(1)
    keys = gathered(key)
    values = keys if parameters.layout.joint else gathered(value)
    return partial_attention(query, keys, values, parameters, key_rotation, seen.unsqueeze(1))[0].to(query.dtype)
