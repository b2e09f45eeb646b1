"""Attention over the rows of a compressed layer in plain PyTorch: the path on a CPU and wherever a kernel does not fit.

One block of keys at a time is read and, where RoPE stands between keys and latents, rebuilt. For a few queries over
neighbouring keys nothing is rebuilt: queries are absorbed, once for each block of positions. Groups of equal latents (a
class) are batched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from rotor.checkpoint.layout import MOST_ROPE_BLOCK, LayerLayout

from ..parameters import AttentionParameters, masked, scaled_and_capped, seq_len_of, shown_by
from ..rotary import Rotation
from .logits import AbsorbedBlocks, AbsorbedQueries, ClassRows, Logits, RebuiltKeys, absorbed_queries

BLOCK_ELEMENTS_CPU = 1 << 18
BLOCK_ELEMENTS_GPU = 1 << 26
"""Numbers or logits of a block of keys; on a CPU what a core's cache holds."""

LEAST_BLOCK = MOST_ROPE_BLOCK
"""Fewest keys that are read at a time: whole blocks of positions."""


def project_keys(
    key: Tensor, key_basis: Tensor, layout: LayerLayout, shift: Tensor | None = None, value: Tensor | None = None
) -> Tensor:
    """Project keys, rotated as they are stored, into their latents, groups side by side.

    Args:
        key: [batch_size, num_kv_heads, seq_len, head_dim], heads in the order of the layout.
        key_basis: [group_size * head_dim, key_rank].
        shift: [key_rank], float32, added before the only rounding: it may be far larger than the sum.
        value: [batch_size, 1, seq_len, *], what v_proj puts out, which is added where it is a part of these latents.
    Returns:
        [batch_size, 1, seq_len, key_rank], dtype of `key`; of codes float32 or wider.
    """
    latents = project_heads(key, key_basis, layout, keys=True, wide=shift is not None)
    of_values = layout.part_of_keys(value)
    if of_values is not None:
        latents = latents + of_values
    return latents if shift is None else latents + shift


def project_heads(
    x: Tensor, basis: Tensor, layout: LayerLayout, *, keys: bool, shift: Tensor | None = None, wide: bool = False
) -> Tensor:
    """Project heads of keys or values into the latents of their groups, side by side.

    Args:
        x: [batch_size, num_kv_heads, seq_len, head_dim], heads in the order of the layout.
        basis: [group_size * head_dim, rank], the latents of keys or those that values are read from.
        shift: [rank], float32, added. wide: compute in float32 or wider, as with a shift.
    Returns:
        [batch_size, 1, seq_len, rank].
    """
    dtype = torch.promote_types(x.dtype, torch.float32) if wide or shift is not None else x.dtype
    x, basis = x.to(dtype), basis.to(dtype)
    stacked = x.reshape(len(x), -1, layout.group_size, *x.shape[2:]).permute(0, 3, 1, 2, 4).flatten(3)
    parts = []
    for cls in layout.classes():
        first, rank = (cls.key_rank, cls.key.rank) if keys else (cls.value_rank, cls.value.rank)
        columns = basis[:, first : first + cls.count * rank].unflatten(-1, (cls.count, rank)).transpose(0, 1)
        heads = stacked[:, :, cls.start : cls.start + cls.count]
        parts.append(torch.einsum("bsnd,ndr->bsnr", heads, columns).flatten(2))
    latents = torch.cat(parts, dim=-1).unsqueeze(1)
    return latents if shift is None else latents + shift


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    key_rotation: Rotation | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Attention of all query heads over the rows of a layer.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in a model
            without RoPE [batch_size, seq_len, sum over query heads of width].
        key, value: rows, [batch_size, 1, kv_len, bytes] uint8, or of numbers [batch_size, 1, kv_len, key_width] and
            [batch_size, 1, kv_len, value_width]. Values of joint latents are read from `key`.
        key_rotation: in blocks: cos and sin by which stored keys are read (`rotary.when_read`), of neighbours [kv_len,
            rotary_dim], or of those of each sequence [batch_size or 1, kv_len, rotary_dim]; of places in any order
            [batch_size or 1, 1 or groups, kv_len, rotary_dim].
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len], heads in the order of the
            uncompressed model; bool (True: attend) or added to the logits; None is causal.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], dtype of query, groups in the order of the layout.
    Source: FDC section 5.1 (post-RoPE), Palu (pre-RoPE); docs/design.md.
    """
    decodes = key_rotation is not None and seq_len_of(query) == 1
    if parameters.layout.coded or decodes:
        return partial_attention(query, key, value, parameters, key_rotation, attention_mask)[0].to(query.dtype)
    outputs = []
    for cls in parameters.layout.classes(query.element_size()):
        side = ClassRows.of(parameters, cls, key, value, query.dtype)
        mask = parameters.mask(attention_mask, parameters.heads(cls))
        values = side.values(slice(None))
        if key_rotation is None:
            queries, keys = absorbed_queries(query, parameters, cls).flatten(1, 2), side.latents(slice(None))
        else:
            queries, keys = query[:, parameters.heads(cls)], side.keys(slice(None), key_rotation).flatten(1, 2)
            values = values.repeat_interleave(parameters.layout.group_size, dim=1)
        outputs.append(dense_attention(queries, keys, values, parameters.scaling, mask, parameters.softcap))
    return torch.cat(outputs, dim=-1)


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    key_rotation: Rotation | None = None,
    attention_mask: Tensor | None = None,
    keys: range | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, with the log-sum-exp by which `join` combines it with the others.

    Args:
        key, value: rows, not necessarily of neighbours: `key_rotation` has one row for each, `attention_mask` one
            column.
        keys: those that some query sees lie within it, from a multiple of LEAST_BLOCK on; None: found here.
        The others as in `attention`.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], and the log-sum-exp of each query head's logits,
        [batch_size, seq_len, num_heads], -inf where a query attends to none of the keys; float32 or wider, groups in
        the order of the layout.
    """
    seq_len, kv_len = seq_len_of(query), key.shape[2]
    is_causal = attention_mask is None and seq_len > 1
    if is_causal:  # a prefill into an empty static cache: nothing attends behind the new keys
        kv_len = seq_len
    on_cpu = query.device.type == "cpu"
    if keys is None:
        keys = range(kv_len)
        if on_cpu and attention_mask is not None and attention_mask.shape[-1] == kv_len:
            keys = _attended(attention_mask)
    index = torch.arange(kv_len if is_causal else 0, device=query.device)
    absorb = on_cpu and key_rotation is not None and _may_absorb(parameters, seq_len, key_rotation)

    def active(start: int) -> slice:
        return slice(start if is_causal else 0, None)

    outputs, sums = [], []
    for cls in parameters.layout.classes(query.element_size()):
        mask_of_class = parameters.mask(attention_mask, parameters.heads(cls))

        def mask(part: slice, queries: slice, whole: Tensor | None = mask_of_class) -> Tensor | None:
            if is_causal:
                return (index[part] <= index[queries, None])[None, None]
            if whole is not None and whole.shape[-1] > 1:
                whole = whole[..., part]
            if whole is not None and whole.shape[-2] > 1:
                whole = whole[..., queries, :]
            return whole

        side = ClassRows.of(parameters, cls, key, value, query.dtype)
        logits: Logits
        if key_rotation is None:
            logits = AbsorbedQueries(query, side)
        else:
            logits = (AbsorbedBlocks if absorb else RebuiltKeys)(query, side, key_rotation)
        attended, log_sums = _running_softmax(logits, side, mask, active, keys)
        outputs.append(attended.permute(0, 3, 1, 2, 4).flatten(2))
        sums.append(log_sums.permute(0, 3, 1, 2, 4).flatten(2))
    return torch.cat(outputs, dim=-1), torch.cat(sums, dim=-1)


def _may_absorb(parameters: AttentionParameters, seq_len: int, rotation: Rotation) -> bool:
    """Tell whether absorbing queries for each block is less work than rebuilding keys, and the first key begins a block
    (a window drops keys one by one)."""
    block = parameters.layout.rope_block
    assert block is not None
    if not seq_len or seq_len * parameters.shape.heads_per_kv >= block or rotation[0].dim() > 3:
        return False
    first = [table[..., :block, :] for table in rotation]
    return not first[0].numel() or all(torch.equal(part[..., 0, :], part[..., -1, :]) for part in first)


def _attended(mask: Tensor) -> range:
    """Range of keys that some query attends to, extended at the front to whole blocks: it leaves out padding and the
    empty rest of a static cache."""
    places = shown_by(mask).flatten(0, -2).any(0).nonzero()
    if not len(places):
        return range(0 if mask.dtype == torch.bool else mask.shape[-1])
    first = int(places[0])
    return range(first - first % LEAST_BLOCK, int(places[-1]) + 1)


def join(outputs: list[Tensor], log_sums: list[Tensor], widths: list[int]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of keys, each weighed by its log-sum-exp.

    Args:
        outputs: [..., sum of widths] of each set. log_sums: [..., heads]; -inf where a head sees none of the set.
        widths: of each head's output.
    Returns:
        [..., sum of widths], zeros for heads that see no key at all; and the log-sum-exp over all sets, [..., heads].
    """
    stacked = torch.stack(log_sums)
    largest = stacked.amax(0)
    weights = torch.exp(stacked - largest.masked_fill(largest == -torch.inf, 0.0))
    total = weights.sum(0)
    shares = weights / total.masked_fill(total == 0.0, 1.0)
    joined = (torch.stack(outputs) * shares.repeat_interleave(_on(tuple(widths), shares.device), -1)).sum(0)
    return joined, largest + total.log()


@lru_cache(maxsize=256)
def _on(widths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(widths, device=device)


Mask = Callable[[slice, slice], "Tensor | None"]
"""Gives the mask of some keys for some queries, broadcastable to [batch_size, heads, queries, keys]."""


def _running_softmax(
    logits_of: Logits, side: ClassRows, mask: Mask, seeing: Callable[[int], slice], keys: range
) -> tuple[Tensor, Tensor]:
    """Attention of the queries of a class over one block of keys after another, with a running softmax.

    seeing: the queries that see keys from an index on; others see none of them.

    Returns [batch_size, count, heads of a group, seq_len, width], zeros for queries that attend to nothing, and the
    log-sum-exp of the logits, [batch_size, count, heads of a group, seq_len, 1].
    """
    parameters, shape = side.parameters, logits_of.shape
    largest = side.key_rows.new_full((*shape, 1), -torch.inf, dtype=side.wide)
    total, weighted = torch.zeros_like(largest), largest.new_zeros(*shape, side.cls.value.width)
    per_key = shape[0] * max(logits_of.per_key, side.cls.count * side.cls.value.width, *shape[2:])
    budget = BLOCK_ELEMENTS_CPU if weighted.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    block = max(1, budget // per_key // LEAST_BLOCK) * LEAST_BLOCK
    for start in range(keys.start, keys.stop, block):
        part = slice(start, min(start + block, keys.stop))
        active = seeing(start)
        latents = side.latents(part).to(side.wide)
        logits = scaled_and_capped(logits_of(latents, part, active), parameters.scaling, parameters.softcap)
        logits = masked(logits, mask(part, active))
        before = largest[..., active, :]
        now = torch.maximum(before, logits.amax(-1, keepdim=True))
        reference = now.masked_fill(now == -torch.inf, 0.0)
        weight, shrink = torch.exp(logits - reference), torch.exp(before - reference)
        numbers = latents if parameters.layout.joint else side.values(part).to(side.wide)
        attended = (weight.flatten(2, 3) @ numbers).unflatten(2, weight.shape[2:4])
        largest[..., active, :] = now
        total[..., active, :] = total[..., active, :] * shrink + weight.sum(-1, keepdim=True)
        weighted[..., active, :] = weighted[..., active, :] * shrink + attended
    return weighted / total.masked_fill(total == 0.0, 1.0), largest + total.log()


def fused_width(key_width: int, value_width: int) -> int:
    """Width to which keys and values of a prompt are padded.

    PyTorch's fused kernels want equal widths, on a GPU multiples of 8; without them it stores all logits, and takes
    three times as long.
    """
    return -(-max(key_width, value_width) // 8) * 8


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    attention_mask: Tensor | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scaled-dot-product attention of [batch_size, heads, ...] queries over as many or fewer key and value heads.

    Args:
        sinks: [heads], a logit of each query head that takes attention and has no value.

    Returns [batch_size, seq_len, heads * value width].
    """
    seq_len, kv_len = query.shape[2], key.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling  # of the width before it is padded below
    is_causal = attention_mask is None and seq_len > 1
    if is_causal and kv_len > seq_len:
        # A prefill into an empty static cache: nothing attends behind the new keys, so leave that part out.
        key, value = key[:, :, :seq_len], value[:, :, :seq_len]
    if softcap is not None or sinks is not None:
        logits = query.unflatten(1, (key.shape[1], -1)).float() @ key.unsqueeze(2).mT.float()
        if is_causal:
            attention_mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=query.device).tril()[None, None]
        logits = masked(scaled_and_capped(logits, scaling, softcap), attention_mask)
        # A query that may attend to nothing (padding) gives zeros, as in scaled_dot_product_attention.
        if sinks is not None:
            sink_logits = sinks.to(logits.dtype).reshape(key.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink_logits], dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num().to(value.dtype)[..., : key.shape[2]]
        output = (weights.flatten(2, 3) @ value).unflatten(2, weights.shape[2:4])
        return output.permute(0, 3, 1, 2, 4).flatten(2)
    if seq_len == 1 and (attention_mask is None or attention_mask.shape[1] == 1):
        # Decoding: the query heads that share keys become the rows of one matrix product.
        packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        output = functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
        return output.reshape(output.shape[0], 1, -1)
    if query.device.type == "cuda" and attention_mask is not None and query.shape[1] != key.shape[1]:
        # With a mask PyTorch has no fused kernel for heads that share keys, and would store all logits.
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    v_width = value.shape[-1]
    width = fused_width(query.shape[-1], v_width)
    if seq_len > 1 and not query.shape[-1] == v_width == width:
        query, key, value = (functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :v_width].transpose(1, 2).flatten(2)
