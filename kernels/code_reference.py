"""Attention over rows of codes in plain PyTorch: the path on a CPU and wherever a kernel does not fit.

Rows are unpacked a block of keys at a time, with a running softmax: the cache is never in floats as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.format.columns import Columns
from rotor.format.layout import GroupClass

from .decode_reference import decode_class, serves
from .parameters import AttentionParameters, class_rotation, seq_len_of
from .rows import unpack
from .running_softmax import attend_in_blocks


def coded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """As `reference.grouped_attention`, for a layer that keeps rows of codes.

    The steps of the codes are in the query basis (domains `post` and `pre`) or in the queries (`none`), and in o_proj;
    what their means add is the constant key in domain `pre`, a bias of o_proj for values, and nothing after RoPE:
    except under a soft cap, where codes must have means of -s/2 (an asymmetry that the softmax would see).

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in domain
            `none` [batch_size, seq_len, sum over query heads of qk_rank].
        key, value: rows of bytes, [batch_size, 1, kv_len, bytes], uint8; their columns of 16 bits in query's dtype.
            Joint latents are in the rows of keys; those of values have no bytes then.
        key_rotation: cos and sin [kv_len, rotary_dim], in domain `pre`; or of places that differ, [batch_size, 1 or
            groups, kv_len, rotary_dim].
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len], heads in the model's order; bool
            (True: attend) or added to the logits; None is causal.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, groups in the order of the layout.
    """
    alone = seq_len_of(query) == 1
    if alone and serves(query, parameters.query_basis) and (key_rotation is None or key_rotation[0].dim() == 2):
        outputs = []
        for cls in parameters.layout.classes():
            keys, values = _class_rows(key, value, parameters, cls, query.dtype)
            mask = parameters.mask(attention_mask, parameters.heads(cls))
            columns = cls.qk_columns, cls.v_columns
            queries = parameters.queries(query, cls)
            outputs.append(
                decode_class(queries, keys.groups, values.groups, columns, parameters, cls, mask, key_rotation)
            )
        return torch.cat(outputs, dim=-1)
    return partial_attention(query, key, value, parameters, key_rotation, attention_mask)[0].to(query.dtype)


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
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
    seq_len = seq_len_of(query)
    causal = attention_mask is None and seq_len > 1
    # A prefill into an empty static cache: nothing attends behind the new keys.
    kv_len = seq_len if causal else key.shape[2]

    def rows(cls: GroupClass) -> tuple[_Rows, _Rows]:
        return _class_rows(key[:, :, :kv_len], value[:, :, :kv_len], parameters, cls, query.dtype)

    index = torch.arange(seq_len, device=query.device)
    masks: dict[int, Tensor | None] = {}

    def mask(of_heads: slice, start: int, end: int) -> Tensor | None:
        if causal:
            return index[start:end] <= index[start:, None]
        if of_heads.start not in masks:
            masks[of_heads.start] = parameters.mask(attention_mask, of_heads)
        own = masks[of_heads.start]
        return own if own is None or own.shape[-1] == 1 else own[..., start:end]

    rotation = None
    if key_rotation is not None:
        tables = key_rotation

        def rotation(cls: GroupClass, start: int, end: int) -> tuple[Tensor, Tensor]:
            cos, sin = class_rotation(tables, cls)
            return cos[..., start:end, :], sin[..., start:end, :]

    return attend_in_blocks(query, rows, parameters, kv_len, mask, rotation, causal)


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
    key: Tensor, value: Tensor, parameters: AttentionParameters, cls: GroupClass, dtype: torch.dtype
) -> tuple[_Rows, _Rows]:
    """Keys and values of a class in the rows of a layer, [batch_size, 1, kv_len, .]."""
    value = parameters.value_rows(key, value)
    qk_byte, v_byte = parameters.layout.byte_offsets(dtype.itemsize)[cls.start]
    return (
        _Rows(key[:, 0], qk_byte, cls.count, cls.qk_rank, cls.qk_columns, dtype),
        _Rows(value[:, 0], v_byte, cls.count, cls.v_rank, cls.v_columns, dtype),
    )
