"""Attention over the rows of a compressed layer in plain PyTorch: the path on a CPU and wherever a kernel does not fit.

A block of keys at a time is read and, where RoPE stands between keys and latents, materialised: rows are never in
floats as a whole. Groups of equal latents (a class) are batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rotor.format.layout import GroupClass, LayerLayout

from .parameters import AttentionParameters, masked, scaled_and_capped, seq_len_of
from .rotary import Rotation, rotate
from .rows import read_class

BLOCK_ELEMENTS_CPU = 1 << 18
BLOCK_ELEMENTS_GPU = 1 << 26
"""Numbers of a block that are read or materialised, or logits; on a CPU what a core's cache holds."""

LEAST_BLOCK = 64
"""Keys of a block."""


def project_keys(
    key: Tensor,
    key_basis: Tensor,
    layout: LayerLayout,
    shift: Tensor | None = None,
    of_values: Tensor | None = None,
) -> Tensor:
    """Keys, as they are stored, into their latents, side by side.

    Args:
        key: [batch_size, num_kv_heads, seq_len, head_dim], heads in the order of the layout.
        key_basis: [group_size * head_dim, key_rank].
        shift: [key_rank], float32, added before the only rounding: it may be far larger than the sum.
        of_values: [batch_size, 1, seq_len, key_rank], the values' part of joint latents.
    Returns:
        [batch_size, 1, seq_len, key_rank], dtype of `key`; of codes float32 or wider.
    """
    dtype = key.dtype if shift is None else torch.promote_types(key.dtype, shift.dtype)
    key, key_basis = key.to(dtype), key_basis.to(dtype)
    batch_size, _, seq_len, head_dim = key.shape
    stacked = key.reshape(batch_size, -1, layout.group_size, seq_len, head_dim).permute(0, 3, 1, 2, 4).flatten(3)
    parts = []
    for cls in layout.classes():
        basis = key_basis[:, cls.key_rank : cls.key_rank + cls.count * cls.key.rank]
        basis = basis.unflatten(-1, (cls.count, cls.key.rank)).transpose(0, 1)
        keys = stacked[:, :, cls.start : cls.start + cls.count]
        parts.append(torch.einsum("bsnd,ndr->bsnr", keys, basis).flatten(2))
    latents = torch.cat(parts, dim=-1).unsqueeze(1)
    if of_values is not None:
        latents = latents + of_values
    return latents if shift is None else latents + shift


def absorbed_queries(query: Tensor, parameters: AttentionParameters, cls: GroupClass) -> Tensor:
    """Queries of a class in the latents of their keys, where one block holds all positions.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in a model
            without RoPE absorbed already, [batch_size, seq_len, sum over query heads of width].
    Returns:
        [batch_size, count, heads of a group, seq_len, width].
    """
    heads = parameters.heads_per_group
    if query.dim() == 3:
        first, size = cls.key_place * heads, cls.count * heads * cls.key.width
        packed = query[..., first : first + size].unflatten(-1, (cls.count, heads, cls.key.width))
        return packed.permute(0, 2, 3, 1, 4)
    own = query[:, parameters.heads(cls)].unflatten(1, (cls.count, parameters.layout.group_size, -1))
    return torch.einsum("bngpsd,ngdr->bngpsr", own, parameters.basis(cls).to(query.dtype)).flatten(2, 3)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    key_rotation: Rotation | None = None,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of all query heads over the rows of a layer.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in a model
            without RoPE [batch_size, seq_len, sum over query heads of width].
        key, value: rows, [batch_size, 1, kv_len, bytes] uint8, or of numbers [batch_size, 1, kv_len, key_width] and
            [batch_size, 1, kv_len, value_width]. Values of joint latents are read from `key`.
        key_rotation: in blocks: cos and sin by which stored keys are read (`rotary.when_read`), [kv_len, rotary_dim];
            or of places that differ, [batch_size, 1 or groups, kv_len, rotary_dim].
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len], heads in the order of the
            uncompressed model; bool (True: attend) or added to the logits; None is causal.
        dropout: of the weights, in a layer of numbers.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], dtype of query, groups in the order of the layout.
    Source: FDC section 4.1 (post-RoPE), Palu (pre-RoPE); docs/design.md.
    """
    if parameters.layout.coded:
        return partial_attention(query, key, value, parameters, key_rotation, attention_mask)[0].to(query.dtype)
    outputs = []
    for cls in parameters.layout.classes(query.element_size()):
        side = _Class.of(parameters, cls, key, value, query.dtype)
        mask = parameters.mask(attention_mask, parameters.heads(cls))
        values = side.values(slice(None))
        if key_rotation is None:
            queries, keys = absorbed_queries(query, parameters, cls).flatten(1, 2), side.latents(slice(None))
        else:
            queries, keys = query[:, parameters.heads(cls)], side.keys(slice(None), key_rotation).flatten(1, 2)
            values = values.repeat_interleave(parameters.layout.group_size, dim=1)
        capped = parameters.scaling, mask, dropout, parameters.softcap
        outputs.append(attend(queries, keys, values, *capped))
    return torch.cat(outputs, dim=-1)


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    key_rotation: Rotation | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and what it takes to join it with attention over the others.

    Args:
        key, value: rows, not necessarily of neighbours: `key_rotation` has one row for each, `attention_mask` one
            column.
        The others as in `attention`.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], and the log-sum-exp of each query head's logits,
        [batch_size, seq_len, num_heads], -inf where a query attends to none of the keys; float32 or wider, groups in
        the order of the layout.
    """
    seq_len = seq_len_of(query)
    causal = attention_mask is None and seq_len > 1
    # A prefill into an empty static cache: nothing attends behind the new keys.
    kv_len = seq_len if causal else key.shape[2]
    index = torch.arange(seq_len, device=query.device)
    outputs, sums = [], []
    for cls in parameters.layout.classes(query.element_size()):
        own = parameters.mask(attention_mask, parameters.heads(cls))

        def mask(start: int, end: int, own: Tensor | None = own) -> Tensor | None:
            if causal:
                return index[start:end] <= index[start:, None]
            return own if own is None or own.shape[-1] == 1 else own[..., start:end]

        side = _Class.of(parameters, cls, key, value, query.dtype)
        attended, log_sums = _running_softmax(query, side, key_rotation, mask, causal, kv_len)
        outputs.append(attended.permute(0, 3, 1, 2, 4).flatten(2))
        sums.append(log_sums.permute(0, 3, 1, 2, 4).flatten(2))
    return torch.cat(outputs, dim=-1), torch.cat(sums, dim=-1)


def products(
    query: Tensor, key: Tensor, parameters: AttentionParameters, cls: GroupClass, key_rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the logits of a class are products of, all keys at once; see `attention` for the arguments.

    Returns:
        Queries [batch_size, count, n, heads, seq_len, width], n times as many heads as keys [batch_size, count, n,
        kv_len, width]; and what is added to the unscaled logits, [batch_size, count, n, heads, seq_len, 1], or None.
    """
    side = _Class.of(parameters, cls, key, key, query.dtype)
    if key_rotation is None:
        queries = absorbed_queries(query, parameters, cls).unsqueeze(2)
        extra = None if query.dim() == 3 else _constant_logits(query, parameters, cls)
        return queries, side.latents(slice(None)).unsqueeze(2), None if extra is None else extra.unsqueeze(2)
    size = parameters.layout.group_size
    queries = query[:, parameters.heads(cls)].unflatten(1, (cls.count, size, -1))
    return queries, side.keys(slice(None), key_rotation), None


class _Class(NamedTuple):
    """A class of groups in the rows of a layer."""

    parameters: AttentionParameters
    cls: GroupClass
    key_rows: Tensor
    value_rows: Tensor
    dtype: torch.dtype

    @classmethod
    def of(
        cls, parameters: AttentionParameters, of: GroupClass, key: Tensor, value: Tensor, dtype: torch.dtype
    ) -> _Class:
        return cls(parameters, of, key[:, 0], parameters.value_rows(key, value)[:, 0], dtype)

    def latents(self, part: slice) -> Tensor:
        """What keys are read from, [batch_size, count, keys, width]."""
        c = self.cls
        return read_class(self.key_rows[:, part], c.key, c.key_byte, c.key_stride, c.count, self.dtype).transpose(1, 2)

    def values(self, part: slice) -> Tensor:
        """[batch_size, count, keys, width]."""
        c, rows = self.cls, self.value_rows[:, part]
        return read_class(rows, c.value, c.value_byte, c.value_stride, c.count, self.dtype).transpose(1, 2)

    def keys(self, part: slice, rotation: Rotation, latents: Tensor | None = None) -> Tensor:
        """Materialised keys, rotated, [batch_size, count, group_size, keys, head_dim]."""
        latents = self.latents(part) if latents is None else latents
        basis, constant = self.parameters.basis(self.cls), self.parameters.constant(self.cls)
        keys = torch.einsum("bnlr,ngdr->bngld", latents.to(basis.dtype), basis)
        if constant is not None:
            keys = keys.to(torch.promote_types(keys.dtype, constant.dtype)) + constant.unsqueeze(2)
        return rotate(keys, *(self._table(table)[..., part, :] for table in rotation)).to(self.dtype)

    def _table(self, table: Tensor) -> Tensor:
        """Of the class, broadcastable to [batch_size, count, group_size, kv_len, rotary_dim]."""
        if table.dim() == 2:
            return table
        groups = slice(self.cls.start, self.cls.start + self.cls.count) if table.shape[1] > 1 else slice(None)
        return table[:, groups].unsqueeze(2)


Mask = Callable[[int, int], "Tensor | None"]
"""(start, end) -> what is seen of these keys, broadcastable to [batch_size, heads, seq_len, end - start]."""


def _running_softmax(
    query: Tensor, side: _Class, rotation: Rotation | None, mask: Mask, causal: bool, kv_len: int
) -> tuple[Tensor, Tensor]:
    """Attention of the queries of a class, a block of keys at a time.

    Returns [batch_size, count, heads of a group, seq_len, width], zeros for queries that attend to nothing, and the
    log-sum-exp of the logits, [batch_size, count, heads of a group, seq_len, 1].
    """
    parameters, cls, size = side.parameters, side.cls, side.parameters.layout.group_size
    dtype = torch.promote_types(query.dtype, torch.float32)
    if rotation is None:
        queries = absorbed_queries(query, parameters, cls).to(dtype)
        if parameters.softcap is not None:  # which sees what is added to all logits of a query
            extra = _constant_logits(query, parameters, cls)
        else:
            extra = None
    else:
        queries, extra = query[:, parameters.heads(cls)].unflatten(1, (cls.count, -1)).to(dtype), None
    batch_size, count, heads, seq_len, _ = queries.shape
    if not kv_len:
        nothing = queries.new_full((batch_size, count, heads, seq_len, 1), -torch.inf)
        return queries.new_zeros(batch_size, count, heads, seq_len, cls.value.width), nothing
    largest = total = weighted = queries.new_empty(0)  # set by the first block
    per_key = batch_size * count * max(heads * seq_len, cls.key.width, cls.value.width)
    if rotation is not None:
        per_key = max(per_key, batch_size * count * size * parameters.shape.head_dim)
    budget = BLOCK_ELEMENTS_CPU if query.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    block = max(LEAST_BLOCK, budget // per_key)
    for start in range(0, kv_len, block):
        end = min(start + block, kv_len)
        part = slice(start, end)
        seen = slice(start if causal else 0, None)  # earlier queries see none of these keys
        latents = side.latents(part)
        own = queries[..., seen, :]
        if rotation is None:
            logits = (own.flatten(2, 3) @ latents.to(dtype).mT).unflatten(2, own.shape[2:4])
        else:
            grouped = own.unflatten(2, (size, -1))
            logits = grouped.flatten(3, 4) @ side.keys(part, rotation, latents).to(dtype).mT
            logits = logits.unflatten(3, grouped.shape[3:5]).flatten(2, 3)
        if extra is not None:
            logits = logits + extra[..., seen, :]
        logits = masked(scaled_and_capped(logits, parameters.scaling, parameters.softcap), mask(start, end))
        block_largest = logits.amax(-1, keepdim=True)
        new_largest = block_largest if start == 0 else torch.maximum(largest[..., seen, :], block_largest)
        reference = new_largest.masked_fill(new_largest == -torch.inf, 0.0)
        weight = torch.exp(logits - reference)
        numbers = (latents if parameters.layout.joint else side.values(part)).to(dtype)
        attended = (weight.flatten(2, 3) @ numbers).unflatten(2, weight.shape[2:4])
        if start == 0:  # which all queries may see
            largest, total, weighted = new_largest.clone(), weight.sum(-1, keepdim=True), attended
            continue
        shrink = torch.exp(largest[..., seen, :] - reference)
        largest[..., seen, :] = new_largest
        total[..., seen, :] = total[..., seen, :] * shrink + weight.sum(-1, keepdim=True)
        weighted[..., seen, :] = weighted[..., seen, :] * shrink + attended
    return weighted / total.masked_fill(total == 0.0, 1.0), largest + total.log()


def _constant_logits(query: Tensor, parameters: AttentionParameters, cls: GroupClass) -> Tensor | None:
    """What the constant keys add to all logits of a query, unscaled, [batch_size, count, heads, seq_len, 1]."""
    constant = parameters.constant(cls)
    if constant is None:
        return None
    own = query[:, parameters.heads(cls)].unflatten(1, (cls.count, parameters.layout.group_size, -1))
    return torch.einsum("bngpsd,ngd->bngps", own.to(constant.dtype), constant).flatten(2, 3).unsqueeze(-1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Scaled-dot-product attention of [batch_size, heads, ...] queries over as many or fewer key and value heads.

    Returns [batch_size, seq_len, heads * value width].
    """
    seq_len, kv_len = query.shape[2], key.shape[2]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling  # of the width before it is padded below
    is_causal = False
    if attention_mask is None and seq_len > 1:  # a branch, since torch.compile would make the condition symbolic
        is_causal = True
    if is_causal and kv_len > seq_len:
        # A prefill into an empty static cache: nothing attends behind the new keys, so leave that part out.
        key, value = key[:, :, :seq_len], value[:, :, :seq_len]
    if softcap is not None:
        logits = query.unflatten(1, (key.shape[1], -1)).float() @ key.unsqueeze(2).mT.float()
        if is_causal:
            attention_mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=query.device).tril()[None, None]
        return _softmax_attention(logits, value, scaling, attention_mask, softcap, dropout)
    if seq_len == 1 and (attention_mask is None or attention_mask.shape[1] == 1):
        # Decoding: the query heads that share keys become the rows of one matrix product.
        packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        output = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
        return output.reshape(output.shape[0], 1, -1)
    v_width = value.shape[-1]
    width = max(query.shape[-1], v_width)
    if seq_len > 1 and query.shape[-1] != v_width:
        # PyTorch's fused kernels want equal widths; without them it stores all logits, and takes three times as long.
        query, key, value = (functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :v_width].transpose(1, 2).flatten(2)


def _softmax_attention(
    logits: Tensor,
    value: Tensor,
    scaling: float,
    attention_mask: Tensor | None,
    softcap: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax and value product for logits [batch_size, count, heads of a group, seq_len, kv_len], unscaled.

    `value` is [batch_size, count, kv_len, width]. Returns [batch_size, seq_len, heads * width].
    """
    logits = masked(scaled_and_capped(logits, scaling, softcap), attention_mask)
    # A query that may attend to nothing (padding) gives zeros, as in scaled_dot_product_attention.
    probabilities = torch.softmax(logits, dim=-1).nan_to_num().to(value.dtype)
    probabilities = functional.dropout(probabilities, dropout)
    heads, seq_len = logits.shape[2], logits.shape[3]
    output = (probabilities.flatten(2, 3) @ value).unflatten(2, (heads, seq_len))
    return output.permute(0, 3, 1, 2, 4).flatten(2)
