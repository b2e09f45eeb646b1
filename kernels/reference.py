"""Attention over the rows of a compressed layer in plain PyTorch: the path on a CPU and wherever a kernel does not fit.

A block of keys at a time is read and, where RoPE stands between keys and latents, materialised. For a few queries over
neighbouring keys that is done for fast planes alone; of slow planes the query is absorbed, once for each block of
positions. Groups of equal latents (a class) are batched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
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


HAS_BFLOAT16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
"""Whether this CPU multiplies bfloat16; asked by a private name, which may go, and not while a model is traced."""


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what this CPU rebuilds keys of a model's dtype fastest; all else is float32 or wider."""
    return dtype if dtype == torch.bfloat16 and HAS_BFLOAT16 else torch.promote_types(dtype, torch.float32)


def project_keys(
    key: Tensor, key_basis: Tensor, layout: LayerLayout, shift: Tensor | None = None, of_values: Tensor | None = None
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
) -> Tensor:
    """Attention of all query heads over the rows of a layer.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in a model
            without RoPE [batch_size, seq_len, sum over query heads of width].
        key, value: rows, [batch_size, 1, kv_len, bytes] uint8, or of numbers [batch_size, 1, kv_len, key_width] and
            [batch_size, 1, kv_len, value_width]. Values of joint latents are read from `key`.
        key_rotation: in blocks: cos and sin by which stored keys are read (`rotary.when_read`), of neighbours [kv_len,
            rotary_dim]; of places in any order [batch_size, 1 or groups, kv_len, rotary_dim].
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len], heads in the order of the
            uncompressed model; bool (True: attend) or added to the logits; None is causal.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], dtype of query, groups in the order of the layout.
    Source: FDC section 4.1 (post-RoPE), Palu (pre-RoPE); docs/design.md.
    """
    decodes = key_rotation is not None and seq_len_of(query) == 1
    if parameters.layout.coded or decodes:
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
        outputs.append(attend(queries, keys, values, parameters.scaling, mask, parameters.softcap))
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
    keys = range(seq_len if causal else key.shape[2])
    eager_cpu = query.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager_cpu and attention_mask is not None and attention_mask.shape[-1] == len(keys):
        keys = _attended(attention_mask)
    index = torch.arange(seq_len, device=query.device)
    absorb = eager_cpu and key_rotation is not None and _may_absorb(parameters, seq_len, key_rotation)
    outputs, sums = [], []
    for cls in parameters.layout.classes(query.element_size()):
        own = parameters.mask(attention_mask, parameters.heads(cls))

        def mask(part: slice, own: Tensor | None = own) -> Tensor | None:
            if causal:
                return index[part] <= index[part.start :, None]
            return own if own is None or own.shape[-1] == 1 else own[..., part]

        side = _Class.of(parameters, cls, key, value, query.dtype)
        logits: _AbsorbedQueries | _RebuiltKeys = (
            _AbsorbedQueries(query, side) if key_rotation is None else _RebuiltKeys(query, side, key_rotation, absorb)
        )
        attended, log_sums = _running_softmax(logits, side, mask, causal, keys)
        outputs.append(attended.permute(0, 3, 1, 2, 4).flatten(2))
        sums.append(log_sums.permute(0, 3, 1, 2, 4).flatten(2))
    return torch.cat(outputs, dim=-1), torch.cat(sums, dim=-1)


def _may_absorb(parameters: AttentionParameters, seq_len: int, rotation: Rotation) -> bool:
    """Whether absorbing queries for each block is less work than materialising it, and blocks begin where they should:
    a window lets go of keys one by one."""
    block = parameters.layout.rope_block
    assert block is not None
    if seq_len * parameters.shape.heads_per_kv >= block or rotation[0].dim() > 2:
        return False
    slow = slice(parameters.layout.fast_planes, rotation[0].shape[-1] // 2)
    return not len(rotation[0]) or all(torch.equal(table[0, slow], table[:block][-1, slow]) for table in rotation)


def _attended(mask: Tensor) -> range:
    """From the first key that some query attends to, less what keeps blocks whole, to the last: without padding and the
    empty rest of a static cache."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    places = seen.flatten(0, -2).any(0).nonzero()
    if not len(places):
        return range(0 if mask.dtype == torch.bool else mask.shape[-1])
    first = int(places[0])
    return range(first - first % LEAST_BLOCK, int(places[-1]) + 1)


def join(outputs: list[Tensor], log_sums: list[Tensor], widths: list[int]) -> tuple[Tensor, Tensor]:
    """Attention to all keys from attention to disjoint sets of them, each weighed by its log-sum-exp.

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
    found = (torch.stack(outputs) * shares.repeat_interleave(_on(tuple(widths), shares.device), -1)).sum(0)
    return found, largest + total.log()


@lru_cache(maxsize=256)
def _on(widths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(widths, device=device)


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

    @property
    def wide(self) -> torch.dtype:
        """Of logits and sums."""
        return torch.promote_types(self.dtype, torch.float32)

    def latents(self, part: slice) -> Tensor:
        """What keys are read from, [batch_size, count, keys, width]."""
        c = self.cls
        return read_class(self.key_rows[:, part], c.key, c.key_byte, c.key_stride, c.count, self.wide).transpose(1, 2)

    def values(self, part: slice) -> Tensor:
        """[batch_size, count, keys, width]."""
        c, rows = self.cls, self.value_rows[:, part]
        return read_class(rows, c.value, c.value_byte, c.value_stride, c.count, self.wide).transpose(1, 2)

    def keys(self, part: slice, rotation: Rotation, latents: Tensor | None = None) -> Tensor:
        """Materialised keys, rotated, [batch_size, count, group_size, keys, head_dim]."""
        latents = self.latents(part) if latents is None else latents
        basis, constant = self.parameters.basis(self.cls), self.parameters.constant(self.cls)
        keys = torch.einsum("bnlr,ngdr->bngld", latents.to(basis.dtype), basis)
        if constant is not None:
            keys = keys.to(torch.promote_types(keys.dtype, constant.dtype)) + constant.unsqueeze(2)
        tables = (self.table(table)[..., part, :] for table in rotation)
        return rotate(keys, *(own if own.dim() == 2 else own.unsqueeze(2) for own in tables)).to(self.dtype)

    def table(self, table: Tensor) -> Tensor:
        """cos or sin of the class, broadcastable to [batch_size, count, kv_len, rotary_dim]."""
        if table.dim() == 2:
            return table
        return table[:, self.cls.start : self.cls.start + self.cls.count] if table.shape[1] > 1 else table


class _AbsorbedQueries:
    """Logits where one block holds all positions: queries are in the latents of their keys."""

    def __init__(self, query: Tensor, side: _Class) -> None:
        parameters, cls = side.parameters, side.cls
        self.queries = absorbed_queries(query, parameters, cls).to(side.wide)
        self.shape, self.per_key = self.queries.shape[:4], cls.count * cls.key.width
        self.extra = None
        if parameters.softcap is not None:  # which sees what is added to all logits of a query
            self.extra = _constant_logits(query, parameters, cls)

    def __call__(self, latents: Tensor, part: slice, seen: slice) -> Tensor:
        """[batch_size, count, heads of a group, queries that are seen, keys], unscaled."""
        own = self.queries[..., seen, :]
        logits = (own.flatten(2, 3) @ latents.mT).unflatten(2, own.shape[2:4])
        return logits if self.extra is None else logits + self.extra[..., seen, :]


class _RebuiltKeys:
    """Logits of rotated queries over keys in blocks of positions.

    Rebuilt are fast planes, or with `absorb` False all of a key. Planes are interleaved, so that one complex product
    rotates them.
    """

    def __init__(self, query: Tensor, side: _Class, rotation: Rotation, absorb: bool) -> None:
        parameters, cls, layout = side.parameters, side.cls, side.parameters.layout
        head_dim, planes = parameters.shape.head_dim, rotation[0].shape[-1] // 2
        assert layout.rope_block is not None
        self.block, self.size, self.wide = layout.rope_block, layout.group_size, side.wide
        self.planes = layout.fast_planes if absorb else planes
        plane = torch.arange(planes, device=query.device)
        both = torch.stack([plane, plane + planes], dim=-1)
        rest = torch.arange(2 * planes, head_dim, device=query.device)
        rebuilt, slow = both[: self.planes].flatten(), torch.cat([both[self.planes :].T.flatten(), rest])
        if not absorb:
            rebuilt, slow = torch.cat([rebuilt, rest]), slow[:0]
        # [batch_size, count, group_size, heads of a KV head, seq_len, head_dim]
        queries = query[:, parameters.heads(cls)].unflatten(1, (cls.count, self.size, -1)).to(self.wide)
        self.shape = (len(query), cls.count, queries.shape[2] * queries.shape[3], queries.shape[4])
        self.queries = queries[..., rebuilt]
        basis, constant = parameters.basis(cls), parameters.constant(cls)
        self.dtype = product_dtype(side.dtype)
        self.basis = basis[:, :, rebuilt].flatten(1, 2).mT.to(self.dtype)  # [count, width, group_size * rebuilt]
        self.constant = None if constant is None else constant[..., rebuilt].to(self.wide)[:, None]
        self.rotation = [side.table(table)[..., : self.planes] for table in rotation]
        self.per_key = cls.count * max(cls.key.width, self.basis.shape[-1])
        self.absorbed = None
        if len(slow):
            columns = basis if constant is None else torch.cat([basis, constant.to(basis.dtype).unsqueeze(-1)], dim=-1)
            starts = [table[:: self.block].to(self.wide) for table in rotation]
            rotated = rotate(queries.unsqueeze(-2), starts[0], -starts[1])[..., slow].flatten(3, 5)
            absorbed = rotated @ columns[:, :, slow].to(self.wide)  # a block's constant logit in the last column
            absorbed = absorbed.unflatten(3, (*queries.shape[3:5], -1)).flatten(2, 3).flatten(2, 3)
            self.absorbed = absorbed.transpose(2, 3)  # [batch_size, count, blocks, heads * seq_len, width]

    def __call__(self, latents: Tensor, part: slice, seen: slice) -> Tensor:
        """[batch_size, count, heads of a group, queries that are seen, keys], unscaled."""
        logits = None
        if self.basis.shape[-1]:
            own = self.queries[..., seen, :]
            keys = self._keys(latents, part).permute(0, 1, 3, 4, 2)  # [batch_size, count, group_size, rebuilt, keys]
            logits = (own.flatten(3, 4) @ keys).unflatten(3, own.shape[3:5]).flatten(2, 3)
        if self.absorbed is None:
            assert logits is not None
            return logits
        slow = self._slow(latents, part).unflatten(2, self.shape[2:])[..., seen, :]
        return slow if logits is None else logits.add_(slow)

    def _keys(self, latents: Tensor, part: slice) -> Tensor:
        """[batch_size, count, keys, group_size, rebuilt]."""
        keys = (latents.to(self.dtype) @ self.basis).to(self.wide).unflatten(-1, (self.size, -1))
        if self.constant is not None:
            keys += self.constant
        planes = torch.view_as_complex(keys[..., : 2 * self.planes].unflatten(-1, (-1, 2)))
        rotation = torch.complex(*(table[..., part, :].to(self.wide) for table in self.rotation))
        planes.mul_(rotation.unsqueeze(-2))
        return keys

    def _slow(self, latents: Tensor, part: slice) -> Tensor:
        """[batch_size, count, heads * seq_len, keys]."""
        assert self.absorbed is not None
        count = latents.shape[2]
        if count % self.block:
            latents = functional.pad(latents, (0, 0, 0, -count % self.block))
        latents = latents.unflatten(2, (-1, self.block))
        own = self.absorbed[:, :, part.start // self.block :][:, :, : latents.shape[2]]
        logits = own[..., : latents.shape[-1]] @ latents.mT
        if self.constant is not None:
            logits += own[..., -1:]
        return logits.transpose(2, 3).flatten(3)[..., :count]


Mask = Callable[[slice], "Tensor | None"]
"""What is seen of these keys, broadcastable to [batch_size, heads, seq_len, keys]."""


def _running_softmax(
    logits_of: _AbsorbedQueries | _RebuiltKeys, side: _Class, mask: Mask, causal: bool, keys: range
) -> tuple[Tensor, Tensor]:
    """Attention of the queries of a class, a block of keys at a time.

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
        seen = slice(start if causal else 0, None)  # earlier queries see none of these keys
        latents = side.latents(part).to(side.wide)
        logits = scaled_and_capped(logits_of(latents, part, seen), parameters.scaling, parameters.softcap)
        logits = masked(logits, mask(part))
        before = largest[..., seen, :]
        now = torch.maximum(before, logits.amax(-1, keepdim=True))
        reference = now.masked_fill(now == -torch.inf, 0.0)
        weight, shrink = torch.exp(logits - reference), torch.exp(before - reference)
        numbers = latents if parameters.layout.joint else side.values(part).to(side.wide)
        attended = (weight.flatten(2, 3) @ numbers).unflatten(2, weight.shape[2:4])
        largest[..., seen, :] = now
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
        logits = masked(scaled_and_capped(logits, scaling, softcap), attention_mask)
        # A query that may attend to nothing (padding) gives zeros, as in scaled_dot_product_attention.
        weights = torch.softmax(logits, dim=-1).nan_to_num().to(value.dtype)
        output = (weights.flatten(2, 3) @ value).unflatten(2, weights.shape[2:4])
        return output.permute(0, 3, 1, 2, 4).flatten(2)
    if seq_len == 1 and (attention_mask is None or attention_mask.shape[1] == 1):
        # Decoding: the query heads that share keys become the rows of one matrix product.
        packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
        output = functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
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
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :v_width].transpose(1, 2).flatten(2)
