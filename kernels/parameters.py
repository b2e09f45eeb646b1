"""What attention of a compressed layer goes by in each call, and what of it belongs to a class of groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.format.layout import GroupClass, LayerLayout


@dataclass(frozen=True, eq=False)
class AttentionParameters:
    """A layer without its queries and rows.

    layout: what it stores. heads_per_kv: query heads per KV head.
    scaling: factor on the logits; that of the uncompressed model.
    query_basis: [group_size * head_dim, qk_width]; None in domain `none`.
    constant_key: [num_kv_heads, head_dim], in domain `pre` with codes: added to the rebuilt keys of each KV head, in
        the order of the layout, before they are rotated.
    softcap: bound that the logits are pressed below, before the mask; None for none.
    """

    layout: LayerLayout
    heads_per_kv: int
    scaling: float
    query_basis: Tensor | None = None
    constant_key: Tensor | None = None
    softcap: float | None = None

    def heads(self, cls: GroupClass) -> slice:
        """The query heads of a class, in the order of the layout."""
        of_group = self.layout.group_size * self.heads_per_kv
        return slice(cls.start * of_group, (cls.start + cls.count) * of_group)

    def value_rows(self, key: Tensor, value: Tensor) -> Tensor:
        """The rows that values are read from: those of the keys where both share their latents."""
        return key if self.layout.joint else value

    def queries(self, query: Tensor, cls: GroupClass) -> Tensor:
        """The queries of a class, projected wherever its keys are not rebuilt.

        Args:
            query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; or
                projected, [batch_size, seq_len, sum over query heads of qk_rank], as always in domain `none`.
        Returns:
            [batch_size, count, query heads of a group, seq_len, qk_rank]; head_dim in place of qk_rank in domain `pre`.
        """
        of_group = self.layout.group_size * self.heads_per_kv
        if query.dim() == 3:
            first = cls.qk_offset * of_group
            packed = query[..., first : first + cls.count * of_group * cls.qk_rank]
            return packed.unflatten(-1, (cls.count, -1, cls.qk_rank)).permute(0, 2, 3, 1, 4)
        own = query[:, self.heads(cls)].unflatten(1, (cls.count, of_group))
        if self.layout.domain == "pre":
            return own
        split = own.unflatten(2, (self.layout.group_size, self.heads_per_kv))
        return torch.einsum("bngpsd,ngdr->bngpsr", split, self.basis(cls).to(query.dtype)).flatten(2, 3)

    def basis(self, cls: GroupClass) -> Tensor:
        """The query bases of a class, [count, group_size, head_dim, qk_rank]; a view."""
        assert self.query_basis is not None
        return class_basis(self.query_basis, cls).unflatten(1, (self.layout.group_size, -1))

    def constant(self, cls: GroupClass) -> Tensor | None:
        """The constant keys of a class, [count, group_size, head_dim]; a view."""
        size = self.layout.group_size
        if self.constant_key is None:
            return None
        return self.constant_key[cls.start * size : (cls.start + cls.count) * size].unflatten(0, (cls.count, size))

    def mask(self, mask: Tensor | None, heads: slice) -> Tensor | None:
        """The rows of a mask over all query heads of the model that are of some heads in the order of the layout.

        Args:
            mask: [batch_size or 1, num_heads or 1, ...], heads in the order of the uncompressed model.
        """
        if mask is None or mask.shape[1] == 1:
            return mask
        order = torch.tensor(self.layout.kv_head_order)[:, None] * self.heads_per_kv + torch.arange(self.heads_per_kv)
        return mask[:, order.flatten()[heads].to(mask.device)]


def seq_len_of(query: Tensor) -> int:
    """Tokens of queries [batch_size, num_heads, seq_len, head_dim], or projected [batch_size, seq_len, ...]."""
    return query.shape[1 if query.dim() == 3 else 2]


def class_basis(basis: Tensor, cls: GroupClass) -> Tensor:
    """[rows, qk_width] -> the bases of a class, [count, rows, rank]; a view."""
    columns = basis[:, cls.qk_offset : cls.qk_offset + cls.count * cls.qk_rank]
    return columns.unflatten(-1, (cls.count, cls.qk_rank)).transpose(0, 1)


def class_rotation(rotation: tuple[Tensor, Tensor], cls: GroupClass) -> tuple[Tensor, Tensor]:
    """cos and sin of a class, broadcastable to its keys [batch_size, count, size, kv_len, rotary_dim].

    Args:
        rotation: each [kv_len, rotary_dim], or [batch_size, 1 or groups, kv_len, rotary_dim].
    """
    cos, sin = rotation
    if cos.dim() == 2:
        return cos, sin
    groups = slice(cls.start, cls.start + cls.count) if cos.shape[1] > 1 else slice(None)
    return cos[:, groups].unsqueeze(2), sin[:, groups].unsqueeze(2)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits [batch_size, count, heads of a group, seq_len, kv_len] under a mask [batch_size, 1 or heads, ...].

    The mask is bool (True: attend) or added.
    """
    if mask is None:
        return logits
    if mask.dim() == 4:
        mask = mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else logits.shape[1:3])
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def pressed(logits: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Products of queries and keys as logits: scaled, and below the soft cap."""
    logits = logits * scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
