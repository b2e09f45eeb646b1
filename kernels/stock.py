"""PyTorch's attention over the keys and values that `expand` makes of rows, a class of groups at a time.

Where rows are numbers after RoPE or without it, their latents are the keys, and attention's work shrinks with them: the
query heads of a group meet the same ones, all groups of a class at once. Elsewhere KV heads of a group share their
values, and each has keys of its own: one call for each place in a group, so that no values are copied.

Keys and values are padded with zeros to one width, as PyTorch's fused kernels want. These take heads of up to 256
numbers: wider values are attended to in parts, each with the keys again, which is far less than storing all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rotor.checkpoint.layout import GroupClass

from .exact_slots import ExactSlots
from .expand import PagesOf, expand
from .parameters import AttentionParameters, seq_len_of
from .reference.attention import dense_attention
from .reference.logits import ClassRows, absorbed_queries
from .rotary import Rotation, of_sequences

MOST_BYTES = 1 << 30
"""Most bytes of keys and values at a time; beyond that, sequences of a batch are taken one after another."""

FUSED_WIDTH = 256
"""Numbers of a head that PyTorch's fused kernels take."""

Varlen = Callable[..., Tensor]
"""(query [tokens, heads, width], key, value [tokens, heads, width], query_start_loc, kv_start, max_query_len,
max_kv_len, scaling, window or None, softcap or None) -> [tokens, heads, width]: an engine's causal attention."""


def prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    rotation: Rotation | None = None,
    first: int = 0,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Attention as `attention.rows_attention` computes it, for any number of queries."""
    seq_len = seq_len_of(query)
    if attention_mask is None and seq_len > 1:  # a prefill into an empty static cache: its rest is not attended
        key, value = key[:, :, :seq_len], value[:, :, :seq_len]
    batch_size, _, kv_len, _ = key.shape
    layout = parameters.layout
    outputs = []
    for cls in layout.classes(query.element_size()):
        latents = parameters.meets_latents(cls)
        of_keys = cls.key.width if latents else parameters.shape.head_dim
        width = max(of_keys, cls.value.width)
        least = max(of_keys, value_columns(cls, of_keys)) if seq_len > 1 else 0
        whole = 2 * cls.count * layout.group_size * kv_len * width * query.element_size()
        step = max(1, MOST_BYTES // max(1, whole))
        mask = parameters.mask(attention_mask, parameters.heads(cls))
        parts = []
        for start in range(0, batch_size, step):
            sequences = slice(start, min(start + step, batch_size))
            if latents and not layout.coded:
                side = ClassRows.of(parameters, cls, key[sequences], value[sequences], query.dtype)
                keys, values = side.latents(slice(None)), side.values(slice(None))
            else:
                rows = key[sequences, 0], value[sequences, 0]
                of_own = of_sequences(rotation, sequences)
                keys, values = expand(*rows, parameters, cls, query.dtype, of_own, first=first, least=least)
            own_mask = mask if mask is None or mask.shape[0] == 1 else mask[sequences]
            parts.append(_of_class(query[sequences], keys, values, parameters, cls, own_mask))
        outputs.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def prompt_with_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    rotation: Rotation | None,
    first: int,
    attention_mask: Tensor | None,
    exact: ExactSlots,
) -> Tensor:
    """Attention of any number of queries in a layer with exact tokens, [batch_size, seq_len, num_heads * head_dim].

    Rows are expanded to keys and values of each head, behind which the exact ones are laid. Arguments as in
    `attention.rows_attention`.
    """
    scaling, softcap = parameters.scaling, parameters.softcap
    mask = parameters.mask(attention_mask, slice(None))
    batch_size, _, kv_len, _ = key.shape
    shape = parameters.shape
    whole = 4 * shape.num_kv_heads * kv_len * shape.head_dim * query.element_size()
    step = max(1, MOST_BYTES // max(1, whole))
    held = (exact.index >= 0)[:, None, :, None]
    mask, outputs = exact.mask(mask, kv_len), []
    for start in range(0, batch_size, step):
        sequences = slice(start, min(start + step, batch_size))
        of_own = of_sequences(rotation, sequences)
        sides = _expanded(key[sequences, 0], value[sequences, 0], parameters, query.dtype, of_own, first)
        added = (side[sequences].masked_fill(~held[sequences], 0.0) for side in (exact.key, exact.value))
        keys, values = (torch.cat(both, dim=2) for both in zip(sides, added, strict=True))
        outputs.append(dense_attention(query[sequences], keys, values, scaling, mask[sequences], softcap))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _expanded(
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    dtype: torch.dtype,
    rotation: Rotation | None,
    first: int,
    pages: PagesOf | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys after RoPE and values of each head that rows are read as, [batch_size, num_kv_heads, kv_len, head_dim].

    With pages [tokens, num_kv_heads, head_dim].
    """
    keys, values = [], []
    equation = "bnlw,ngdw->bngld" if pages is None else "lnw,ngdw->lngd"
    for cls, basis in zip(parameters.layout.classes(dtype.itemsize), parameters.output_bases(), strict=True):
        of_keys, latents = expand(key, value, parameters, cls, dtype, rotation, first=first, pages=pages)
        keys.append(of_keys)
        values.append(torch.einsum(equation, latents, basis.to(dtype)).flatten(1, 2))
    heads = values[0] if len(values) == 1 else torch.cat(values, dim=1)
    if parameters.value_constant is not None:
        constant = parameters.value_constant
        heads = (heads + (constant[:, None] if pages is None else constant)).to(dtype)
    return keys[0] if len(keys) == 1 else torch.cat(keys, dim=1), heads


def _of_class(
    query: Tensor, keys: Tensor, values: Tensor, parameters: AttentionParameters, cls: GroupClass, mask: Tensor | None
) -> Tensor:
    """Attention of a class, [batch_size, seq_len, sum over its query heads of value width]."""
    if parameters.meets_latents(cls):
        queries = absorbed_queries(query, parameters, cls).unsqueeze(2)
    else:
        queries = query[:, parameters.heads(cls)].unflatten(1, (cls.count, parameters.layout.group_size, -1))
    size, each = queries.shape[2:4]

    def attend_at(place: int, at_place: Tensor, values: Tensor) -> Tensor:
        own_mask = mask  # a mask over heads has all of the class
        if mask is not None and mask.shape[1] > 1:
            own_mask = mask.unflatten(1, (-1, size, each))[:, :, place].flatten(1, 2)
        attended = dense_attention(
            at_place, keys[:, place::size], values, parameters.scaling, own_mask, parameters.softcap
        )
        return attended.unflatten(2, (at_place.shape[1], -1))

    return _by_place(queries, keys.shape[-1], values, cls, attend_at)


def value_columns(cls: GroupClass, key_width: int) -> int:
    """Numbers of a value that are attended to at once, beside keys of a width."""
    parts = -(-cls.value.width // FUSED_WIDTH) if key_width <= FUSED_WIDTH else 1
    return -(-cls.value.width // (8 * parts)) * 8


def _by_place(
    queries: Tensor, width: int, values: Tensor, cls: GroupClass, attend_at: Callable[[int, Tensor, Tensor], Tensor]
) -> Tensor:
    """Attend for the KV heads at each place in their groups, and put the outputs side by side.

    Args:
        queries: [batch_size or tokens, count, group_size, heads of a KV head, ...]. width: of keys; of queries too,
            with zeros behind their own numbers. values: [..., their width].
        attend_at: a place, its queries [.., heads, ...] and some columns of the values -> [..., heads, columns].
    """
    queries = functional.pad(queries, (0, width - queries.shape[-1]))
    parts: tuple[Tensor, ...] = (values,)
    if values.shape[-1] > max(width, FUSED_WIDTH) and width <= FUSED_WIDTH:
        parts = functional.pad(values, (0, -values.shape[-1] % width)).split(width, dim=-1)
    outputs = []
    for place, at_place in enumerate(queries.unbind(2)):
        of_parts = [attend_at(place, at_place.flatten(1, 2), part) for part in parts]
        attended = of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts, dim=-1)
        outputs.append(attended[..., : cls.value.width].unflatten(-2, (cls.count, -1)))
    return torch.stack(outputs, dim=-3).flatten(-4)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    rotation: Rotation | None,
    pages: PagesOf,
    query_start_loc: Tensor,
    max_query_len: int,
    window: int | None = None,
    varlen: Varlen | None = None,
) -> Tensor:
    """Causal attention of packed prompts over pages; see `attention.attend_pages`.

    varlen: attention over packed sequences; by default SDPA, one sequence after another (which waits for the lengths).
    """
    layout, outputs = parameters.layout, []
    around = query_start_loc, pages.kv_start, max_query_len, pages.longest
    options = *around, parameters.scaling, window, parameters.softcap
    for cls in layout.classes(query.element_size()):
        latents = parameters.meets_latents(cls)
        of_keys = cls.key.width if latents else parameters.shape.head_dim
        least = max(-(-of_keys // 8) * 8, value_columns(cls, of_keys))
        options_of_rows = {"pages": pages, "least": least, "latents": latents}
        keys, values = expand(key, value, parameters, cls, query.dtype, rotation, **options_of_rows)
        if latents:
            heads = query if query.dim() == 2 else query.transpose(0, 1)
            queries = absorbed_queries(heads.unsqueeze(0), parameters, cls)[0]
            queries = queries.permute(2, 0, 1, 3).unsqueeze(2)
        else:
            queries = query[:, parameters.heads(cls)].unflatten(1, (cls.count, layout.group_size, -1))

        def attend_at(
            place: int, at_place: Tensor, values: Tensor, keys: Tensor = keys, size: int = queries.shape[2]
        ) -> Tensor:
            return (varlen or _one_by_one)(at_place, keys[:, place::size], values, *options)

        outputs.append(_by_place(queries, keys.shape[-1], values, cls, attend_at))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def prompts_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    query_start_loc: Tensor,
    max_query_len: int,
    window: int | None = None,
    varlen: Varlen | None = None,
) -> Tensor:
    """Causal attention of packed prompts before which nothing lies, to their own keys and values.

    Args:
        key, value: [tokens, num_kv_heads, head_dim], keys after RoPE. The others as in `packed_attention`.
    """
    around = query_start_loc, query_start_loc, max_query_len, max_query_len
    options = parameters.scaling, window, parameters.softcap
    return (varlen or _one_by_one)(query, key, value, *around, *options).flatten(1)


def packed_with_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    rotation: Rotation | None,
    pages: PagesOf,
    query_start_loc: Tensor,
    max_query_len: int,
    window: int | None,
    varlen: Varlen | None,
    exact: ExactSlots,
    new: tuple[Tensor, Tensor],
) -> Tensor:
    """Causal attention of packed prompts in a layer with exact tokens, [tokens, num_heads * head_dim].

    Rows are expanded to keys and values of each head, and the exact ones put in their places. An attention over packed
    sequences has one key for a place, so that all new tokens attend exactly to what was among the newest before them.

    Args:
        exact: exact tokens before the new ones. new: keys after RoPE and values of these.
    """
    one_more = pages._replace(tokens=pages.tokens + 1)  # where slots without a token go
    sides = _expanded(key, value, parameters, query.dtype, rotation, 0, one_more)
    before = pages.kv_start[:-1, None] + exact.index
    before = torch.where(exact.index >= 0, before, pages.tokens).flatten()
    stop = query_start_loc[1:].contiguous()
    token = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(stop, token, right=True).clamp(max=len(stop) - 1)
    index = pages.kv_start[sequence] + pages.kv_lens[sequence] - (stop[sequence] - token)
    index = torch.where(token < stop[-1], index, pages.tokens)
    for side, slots, added in zip(sides, (exact.key, exact.value), new, strict=True):
        side[before.long()] = slots.transpose(1, 2).flatten(0, 1)
        side[index.long()] = added
    around = query_start_loc, pages.kv_start, max_query_len, pages.longest
    options = parameters.scaling, window, parameters.softcap
    return (varlen or _one_by_one)(query, *sides, *around, *options).flatten(1)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """A `Varlen` by SDPA, one sequence after another."""
    query_start, kv_start, _, _, scaling, window, softcap = rest
    output = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype, device=query.device)
    starts, kv_starts = query_start.tolist(), kv_start.tolist()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        span = slice(kv_starts[sequence], kv_starts[sequence + 1])
        kv_len = span.stop - span.start
        if end == start or not kv_len:
            continue
        position = torch.arange(kv_len - (end - start), kv_len, device=query.device)[:, None]
        index = torch.arange(kv_len, device=query.device)
        visible = index <= position
        if window is not None:
            visible &= index > position - window
        q, k, v = (side.transpose(0, 1).unsqueeze(0) for side in (query[start:end], key[span], value[span]))
        attended = dense_attention(q, k, v, scaling, visible[None, None], softcap)
        output[start:end] = attended[0].unflatten(-1, (query.shape[1], -1))
    return output
