"""Rows in pages in plain PyTorch, written and attended to: a serving engine's path wherever kernels do not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.format.layout import LayerLayout

from ...kernels.parameters import AttentionParameters
from ...kernels.reference import partial_attention
from ...kernels.rotary import Rotation, when_read
from ...kernels.rows import pack_layer


def write_rows(
    latents: Tensor, values: Tensor, layout: LayerLayout, pages: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    """Put new rows into their slots.

    Args:
        latents: of keys, [tokens, key_rank]. values: [tokens, value_rank]; not read of joint latents.
        pages: of keys and values, as in `attend_pages`.
        slots: [tokens]: page times page_size plus the row in it. Nothing is kept of a token where it is negative:
            without asking the host it goes into page 0, which engines give to nobody.
    """
    page_size = pages[0].shape[1]
    slots = slots.clamp(min=0).long()
    page, row = slots // page_size, slots % page_size
    pages[0][page, row] = pack_layer(latents, layout, keys=True)
    if not layout.joint:
        pages[1][page, row] = pack_layer(values, layout, keys=False)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    *,
    block_table: Tensor,
    kv_lens: Tensor,
    starts: list[int],
    lengths: list[int],
    rotation: Rotation | None = None,
    window: int | None = None,
    out: Tensor,
) -> None:
    """As `attention.attend_pages`: requests of one token and of similar lengths at once, others one by one.

    Args:
        starts: tokens before each sequence, and all. lengths: at least the keys of each; both known to the host.
    """

    def attend(queries: Tensor, own: list[int]) -> Tensor:
        heads = queries.transpose(1, 2) if queries.dim() == 4 else queries
        most, tables = max(lengths[i] for i in own), (block_table[own], kv_lens[own])
        return paged_attention(heads, key, value, parameters, *tables, most, rotation=rotation, window=window)

    for own in alike([i for i in range(len(lengths)) if starts[i + 1] - starts[i] == 1], lengths):
        singles = torch.tensor([starts[i] for i in own], device=query.device)
        out[singles] = attend(query[singles].unsqueeze(1), own)[:, 0]
    for i in range(len(lengths)):
        if starts[i + 1] - starts[i] > 1:
            tokens = slice(starts[i], starts[i + 1])
            out[tokens] = attend(query[None, tokens], [i])[0]


def alike(requests: list[int], lengths: list[int]) -> list[list[int]]:
    """Requests in groups, so that the longest of each is at most twice the shortest (or one block)."""
    groups: list[list[int]] = []
    shortest = 0
    for index in sorted(requests, key=lambda i: lengths[i]):
        if not groups or lengths[index] > max(2 * shortest, 64):
            groups.append([])
            shortest = lengths[index]
        groups[-1].append(index)
    return groups


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
        own = places.clamp(max=len(rotation[0]) - 1)
        key_rotation = when_read(rotation, parameters.layout.form, own[0] if window is None else own.unsqueeze(1))
    keys = gathered(key)
    values = keys if parameters.layout.joint else gathered(value)
    return partial_attention(query, keys, values, parameters, key_rotation, seen.unsqueeze(1))[0].to(query.dtype)
