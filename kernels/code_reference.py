"""Attention over rows of codes in plain PyTorch: the path on a CPU and wherever a kernel does not fit.

Rows are unpacked a block of keys at a time, with a running softmax: the cache is never in floats as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.format.columns import Columns
from rotor.format.layout import GroupClass, LayerLayout

from .decode_reference import decode_class, serves
from .reference import class_basis, class_mask, rotate
from .rows import unpack

BLOCK_ELEMENTS_CPU = 1 << 18
BLOCK_ELEMENTS_GPU = 1 << 26
"""Logits of a block, or numbers that are unpacked or rebuilt for it; on a CPU what a core's cache holds."""

LEAST_BLOCK = 64
"""Keys of a block."""


def coded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    scaling: float,
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    constant_key: Tensor | None = None,
    attention_mask: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `reference.grouped_attention`, for a layer that keeps rows of codes.

    The steps of the codes are in `query_basis` (domains `post` and `pre`) or in the queries (`none`), and in o_proj;
    what their means add is `constant_key` in domain `pre`, a bias of o_proj for values, and nothing after RoPE: except
    under a soft cap, where codes must have means of -s/2 (an asymmetry that the softmax would see).

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in domain
            `none` [batch_size, seq_len, sum over query heads of qk_rank].
        key, value: rows of bytes, [batch_size, 1, kv_len, bytes], uint8; their columns of 16 bits in query's dtype.
        heads_per_kv, scaling: as in the uncompressed model.
        query_basis: [group_size * head_dim, qk_width], except in domain `none`.
        key_rotation: cos and sin [kv_len, rotary_dim], in domain `pre`.
        constant_key: [num_kv_heads, head_dim], in domain `pre`: added to the rebuilt keys of each KV head, before they
            are rotated.
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len], heads in the model's order; bool
            (True: attend) or added to the logits; None is causal.
        softcap: bound that the logits are pressed below, before the mask; None for none.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, groups in the order of the layout.
    Source: DESIGN section 7.
    """
    domain, size = layout.domain, layout.group_size
    seq_len = query.shape[1] if domain == "none" else query.shape[2]
    causal = attention_mask is None and seq_len > 1
    # A prefill into an empty static cache: nothing attends behind the new keys.
    kv_len = seq_len if causal else key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    outputs = []
    qk_byte = v_byte = column = 0
    for cls in layout.classes():
        assert cls.qk_columns is not None
        assert cls.v_columns is not None
        keys = _Rows(key[:, 0, :kv_len], qk_byte, cls.count, cls.qk_columns, query.dtype)
        values = _Rows(value[:, 0, :kv_len], v_byte, cls.count, cls.v_columns, query.dtype)
        qk_byte, v_byte = keys.end, values.end
        of_heads = slice(cls.start * size * heads_per_kv, (cls.start + cls.count) * size * heads_per_kv)
        if domain == "none":
            width = cls.count * size * heads_per_kv * cls.qk_rank
            packed = query[..., column : column + width].unflatten(-1, (cls.count, -1, cls.qk_rank))
            queries, column = packed.permute(0, 2, 3, 1, 4), column + width
        else:
            queries = query[:, of_heads].unflatten(1, (cls.count, size * heads_per_kv))
        own = class_mask(attention_mask, layout, of_heads, heads_per_kv)
        mask = None if own is None else own.unflatten(1, (1, 1) if own.shape[1] == 1 else queries.shape[1:3])
        rebuilding = basis = constant = None
        if domain != "none":
            assert query_basis is not None
            basis = class_basis(query_basis, cls).unflatten(1, (size, -1))  # [count, size, head_dim, rank]
            if domain == "post":
                split = queries.unflatten(2, (size, heads_per_kv))
                queries = torch.einsum("bngpsd,ngdr->bngpsr", split, basis).flatten(2, 3)
                basis = None
            else:
                assert key_rotation is not None
                constant = _of_class(constant_key, cls, size)
                rebuilding = _Rebuilding(basis, constant, key_rotation)
        if seq_len == 1 and serves(query):
            attended = decode_class(
                queries[..., 0, :],
                keys.groups,
                values.groups,
                (cls.qk_columns, cls.v_columns),
                scaling,
                None if mask is None else mask[..., 0, :],
                softcap,
                basis,
                key_rotation,
                constant,
            )
            outputs.append(attended)
            continue
        attended = _running_softmax(queries.to(wide), keys, values, rebuilding, scaling, mask, causal, softcap, kv_len)
        outputs.append(attended.permute(0, 3, 1, 2, 4).flatten(2).to(query.dtype))
    return torch.cat(outputs, dim=-1)


@dataclass(frozen=True)
class _Rows:
    """The groups of a class in the rows [batch_size, kv_len, bytes] of a layer."""

    rows: Tensor
    first: int
    count: int
    columns: Columns
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.first + self.count * self.columns.row_bytes(self.dtype.itemsize)

    @property
    def groups(self) -> Tensor:
        """[batch_size, kv_len, count, bytes of a group]; a view."""
        return self.rows[..., self.first : self.end].unflatten(-1, (self.count, -1))

    def block(self, start: int, end: int) -> Tensor:
        """The numbers of the keys start ... end - 1, [batch_size, count, end - start, rank]."""
        return unpack(self.groups[:, start:end], self.columns, self.dtype).transpose(1, 2)


@dataclass(frozen=True)
class _Rebuilding:
    """Keys of domain `pre` from their latents: basis [count, size, head_dim, rank], constant [count, size, head_dim]
    or None, cos and sin by index in the cache.
    """

    basis: Tensor
    constant: Tensor | None
    rotation: tuple[Tensor, Tensor]

    def __call__(self, latents: Tensor, start: int) -> Tensor:
        """[batch_size, count, block, rank] -> rotated keys [batch_size, count, size, block, head_dim]."""
        keys = latents[:, :, None] @ self.basis.mT
        if self.constant is not None:
            keys = keys + self.constant.unsqueeze(2)
        return rotate(keys, *(table[start : start + keys.shape[3]] for table in self.rotation))


def _of_class(constant_key: Tensor | None, cls: GroupClass, size: int) -> Tensor | None:
    if constant_key is None:
        return None
    return constant_key[cls.start * size : (cls.start + cls.count) * size].unflatten(0, (cls.count, size))


def _running_softmax(
    queries: Tensor,
    keys: _Rows,
    values: _Rows,
    rebuilding: _Rebuilding | None,
    scaling: float,
    mask: Tensor | None,
    causal: bool,
    softcap: float | None,
    kv_len: int,
) -> Tensor:
    """Attention of queries [batch_size, count, heads of a group, seq_len, width], float32 or wider; `mask` is
    broadcastable to [batch_size, count, heads of a group, seq_len, kv_len].

    Returns [batch_size, count, heads of a group, seq_len, v_rank], zeros for queries that attend to nothing.
    """
    batch_size, count, heads, seq_len, _ = queries.shape
    largest = queries.new_full((batch_size, count, heads, seq_len, 1), -torch.inf)
    total = torch.zeros_like(largest)
    weighted = queries.new_zeros(batch_size, count, heads, seq_len, values.columns.rank)
    per_key = batch_size * count * max(heads * seq_len, keys.columns.rank, values.columns.rank)
    if rebuilding is not None:
        per_key = max(per_key, batch_size * count * rebuilding.basis.shape[1] * rebuilding.basis.shape[2])
    budget = BLOCK_ELEMENTS_CPU if queries.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    block = max(LEAST_BLOCK, budget // per_key)
    for start in range(0, kv_len, block):
        end = min(start + block, kv_len)
        rows = slice(start if causal else 0, None)  # earlier queries see none of these keys
        latents = keys.block(start, end)
        own = queries[..., rows, :]
        if rebuilding is None:
            logits = (own.flatten(2, 3) @ latents.to(own.dtype).mT).unflatten(2, own.shape[2:4])
        else:
            rebuilt = rebuilding(latents, start).to(own.dtype)
            of_heads = own.unflatten(2, (rebuilt.shape[2], -1))
            logits = of_heads.flatten(3, 4) @ rebuilt.mT
            logits = logits.unflatten(3, of_heads.shape[3:5]).flatten(2, 3)
        logits = logits * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if causal:
            index = torch.arange(start, seq_len, device=logits.device)
            logits = logits.masked_fill(index[:, None] < index[: end - start], -torch.inf)
        elif mask is not None:
            part = mask if mask.shape[-1] == 1 else mask[..., start:end]
            logits = logits.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        new_largest = torch.maximum(largest[..., rows, :], logits.amax(-1, keepdim=True))
        reference = new_largest.masked_fill(new_largest == -torch.inf, 0.0)
        weight = torch.exp(logits - reference)
        shrink = torch.exp(largest[..., rows, :] - reference)
        largest[..., rows, :] = new_largest
        total[..., rows, :] = total[..., rows, :] * shrink + weight.sum(-1, keepdim=True)
        numbers = values.block(start, end).to(weight.dtype)
        attended = (weight.flatten(2, 3) @ numbers).unflatten(2, weight.shape[2:4])
        weighted[..., rows, :] = weighted[..., rows, :] * shrink + attended
    return weighted / total.masked_fill(total == 0.0, 1.0)
