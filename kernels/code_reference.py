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
from .reference import class_basis, class_mask, class_rotation
from .rows import unpack
from .running_softmax import attend_in_blocks


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
        key_rotation: cos and sin [kv_len, rotary_dim], in domain `pre`; or of places that differ, [batch_size, 1 or
            groups, kv_len, rotary_dim].
        constant_key: [num_kv_heads, head_dim], in domain `pre`: added to the rebuilt keys of each KV head, before they
            are rotated.
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len], heads in the model's order; bool
            (True: attend) or added to the logits; None is causal.
        softcap: bound that the logits are pressed below, before the mask; None for none.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, groups in the order of the layout.
    """
    alone = query.shape[1] == 1 if layout.domain == "none" else query.shape[2] == 1
    if alone and serves(query) and (key_rotation is None or key_rotation[0].dim() == 2):
        return _decode(
            query, key, value, layout, heads_per_kv, scaling, query_basis, key_rotation, constant_key, attention_mask,
            softcap,
        )  # fmt: skip
    output, _ = partial_attention(
        query, key, value, layout, heads_per_kv, scaling, query_basis, key_rotation, constant_key, attention_mask,
        softcap,
    )  # fmt: skip
    return output.to(query.dtype)


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    scaling: float,
    query_basis: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None,
    constant_key: Tensor | None,
    attention_mask: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """`coded_attention` for one query position of each sequence, on a CPU."""
    domain, size = layout.domain, layout.group_size
    of_group = size * heads_per_kv
    outputs = []
    for cls in layout.classes():
        keys, values = _class_rows(key, value, layout, cls, query.dtype)
        heads = slice(cls.start * of_group, (cls.start + cls.count) * of_group)
        basis = constant = None
        if domain == "none":
            first = cls.qk_offset * of_group
            queries = query[:, 0, first : first + cls.count * of_group * cls.qk_rank].unflatten(
                -1, (cls.count, -1, cls.qk_rank)
            )
        else:
            assert query_basis is not None
            queries = query[:, heads, 0].unflatten(1, (cls.count, of_group))
            basis = class_basis(query_basis, cls).unflatten(1, (size, -1))  # [count, size, head_dim, rank]
        if domain == "post":
            split = queries.unflatten(2, (size, heads_per_kv))
            queries, basis = torch.einsum("bngpd,ngdr->bngpr", split, basis).flatten(2, 3), None
        elif domain == "pre" and constant_key is not None:
            constant = constant_key[cls.start * size : (cls.start + cls.count) * size].unflatten(0, (cls.count, size))
        mask = class_mask(attention_mask, layout, heads, heads_per_kv)
        if mask is not None:
            mask = mask[..., 0, :].unflatten(1, (1, 1) if mask.shape[1] == 1 else (cls.count, of_group))
        outputs.append(
            decode_class(
                queries, keys.groups, values.groups, (cls.qk_columns, cls.v_columns), scaling, mask, softcap, basis,
                key_rotation, constant,
            )
        )  # fmt: skip
    return torch.cat(outputs, dim=-1)


def partial_attention(
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
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and what it takes to join it with attention over the others.

    Args:
        key, value: rows of codes, or packed rows in query's dtype where the layout is not coded; not necessarily
            neighbours: `key_rotation` has one row for each, and `attention_mask` one column.
        The others as in `coded_attention`.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] and the log-sum-exp of each query head's logits,
        [batch_size, seq_len, num_heads], -inf where a query attends to none of the keys; float32 or wider, groups in
        the order of the layout.
    """
    seq_len = query.shape[1] if layout.domain == "none" else query.shape[2]
    causal = attention_mask is None and seq_len > 1
    # A prefill into an empty static cache: nothing attends behind the new keys.
    kv_len = seq_len if causal else key.shape[2]

    def rows(cls: GroupClass) -> tuple[_Rows, _Rows]:
        return _class_rows(key[:, :, :kv_len], value[:, :, :kv_len], layout, cls, query.dtype)

    index = torch.arange(seq_len, device=query.device)
    masks: dict[int, Tensor | None] = {}

    def mask(of_heads: slice, start: int, end: int) -> Tensor | None:
        if causal:
            return index[start:end] <= index[start:, None]
        if of_heads.start not in masks:
            masks[of_heads.start] = class_mask(attention_mask, layout, of_heads, heads_per_kv)
        own = masks[of_heads.start]
        return own if own is None or own.shape[-1] == 1 else own[..., start:end]

    rotation = None
    if key_rotation is not None:
        tables = key_rotation

        def rotation(cls: GroupClass, start: int, end: int) -> tuple[Tensor, Tensor]:
            cos, sin = class_rotation(tables, cls)
            return cos[..., start:end, :], sin[..., start:end, :]

    return attend_in_blocks(
        query, rows, layout, heads_per_kv, scaling, kv_len, mask, layout.domain == "none", query_basis, rotation,
        constant_key, softcap, causal,
    )  # fmt: skip


@dataclass(frozen=True)
class _Rows:
    """The groups of a class in the rows [batch_size, kv_len, .] of a layer; `first` bytes are before them."""

    rows: Tensor
    first: int
    count: int
    rank: int
    columns: Columns | None
    dtype: torch.dtype

    @property
    def groups(self) -> Tensor:
        """[batch_size, kv_len, count, bytes or numbers of a group]; a view."""
        first = self.first // self.rows.element_size()
        each = self.rank if self.columns is None else self.columns.row_bytes(self.dtype.itemsize)
        return self.rows[..., first : first + self.count * each].unflatten(-1, (self.count, each))

    def block(self, start: int, end: int) -> Tensor:
        """The numbers of the keys start ... end - 1, [batch_size, count, end - start, rank]."""
        groups = self.groups[:, start:end]
        numbers = groups if self.columns is None else unpack(groups, self.columns, self.dtype)
        return numbers.transpose(1, 2)


def _class_rows(
    key: Tensor, value: Tensor, layout: LayerLayout, cls: GroupClass, dtype: torch.dtype
) -> tuple[_Rows, _Rows]:
    """Keys and values of a class in the rows of a layer, [batch_size, 1, kv_len, .]."""
    qk_byte, v_byte = layout.byte_offsets(dtype.itemsize)[cls.start]
    return (
        _Rows(key[:, 0], qk_byte, cls.count, cls.qk_rank, cls.qk_columns, dtype),
        _Rows(value[:, 0], v_byte, cls.count, cls.v_rank, cls.v_columns, dtype),
    )
