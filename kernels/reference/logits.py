"""Logits of queries over rows in plain PyTorch, by absorbed queries or by rebuilt keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rotor.checkpoint.layout import GroupClass

from ..parameters import AttentionParameters, read_class
from ..rotary import Rotation, rotate

HAS_BFLOAT16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
"""True where this CPU multiplies bfloat16. The private name may go."""


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which this CPU rebuilds keys fastest; all else is float32 or wider."""
    return dtype if dtype == torch.bfloat16 and HAS_BFLOAT16 else torch.promote_types(dtype, torch.float32)


def absorbed_queries(query: Tensor, parameters: AttentionParameters, cls: GroupClass) -> Tensor:
    """Absorb the queries of a class into the latents of their keys, where one block holds all positions.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in a model
            without RoPE absorbed ones, [batch_size, seq_len, sum over query heads of width].
    Returns:
        [batch_size, count, heads of a group, seq_len, width].
    """
    heads = parameters.heads_per_group
    if query.dim() == 3:
        first, size = cls.key_column * heads, cls.count * heads * cls.key.width
        packed = query[..., first : first + size].unflatten(-1, (cls.count, heads, cls.key.width))
        return packed.permute(0, 2, 3, 1, 4)
    class_query = query[:, parameters.heads(cls)].unflatten(1, (cls.count, parameters.layout.group_size, -1))
    return torch.einsum("bngpsd,ngdr->bngpsr", class_query, parameters.basis(cls).to(query.dtype)).flatten(2, 3)


def products(
    query: Tensor, key: Tensor, parameters: AttentionParameters, cls: GroupClass, key_rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of a class's logits, for all keys at once; see `reference.attention` for the arguments.

    Returns:
        Queries [batch_size, count, n, heads, seq_len, width], n times as many heads as keys [batch_size, count, n,
        kv_len, width]; and what is added to the unscaled logits, [batch_size, count, n, heads, seq_len, 1], or None.
    """
    side = ClassRows.of(parameters, cls, key, key, query.dtype)
    if key_rotation is None:
        queries = absorbed_queries(query, parameters, cls).unsqueeze(2)
        extra = None if query.dim() == 3 else _constant_logits(query, parameters, cls)
        return queries, side.latents(slice(None)).unsqueeze(2), None if extra is None else extra.unsqueeze(2)
    size = parameters.layout.group_size
    queries = query[:, parameters.heads(cls)].unflatten(1, (cls.count, size, -1))
    return queries, side.keys(slice(None), key_rotation), None


class ClassRows(NamedTuple):
    """A class of groups in the rows of a layer."""

    parameters: AttentionParameters
    cls: GroupClass
    key_rows: Tensor
    value_rows: Tensor
    dtype: torch.dtype

    @classmethod
    def of(
        cls, parameters: AttentionParameters, of: GroupClass, key: Tensor, value: Tensor, dtype: torch.dtype
    ) -> ClassRows:
        return cls(parameters, of, key[:, 0], parameters.value_rows(key, value)[:, 0], dtype)

    @property
    def wide(self) -> torch.dtype:
        """Dtype of logits and sums."""
        return torch.promote_types(self.dtype, torch.float32)

    def latents(self, part: slice) -> Tensor:
        """The latents of keys as attention reads them, [batch_size, count, keys, width]."""
        c = self.cls
        return read_class(self.key_rows[:, part], c.key, c.key_byte, c.key_stride, c.count, self.wide).transpose(1, 2)

    def values(self, part: slice) -> Tensor:
        """The latents of values as attention reads them, [batch_size, count, keys, width]."""
        c, rows = self.cls, self.value_rows[:, part]
        return read_class(rows, c.value, c.value_byte, c.value_stride, c.count, self.wide).transpose(1, 2)

    def keys(self, part: slice, rotation: Rotation | None) -> Tensor:
        """Expanded keys, rotated where they are not stored so, [batch_size, count, group_size, keys, head_dim]."""
        basis, constant = self.parameters.basis(self.cls), self.parameters.constant(self.cls)
        keys = torch.einsum("bnlr,ngdr->bngld", self.latents(part).to(basis.dtype), basis)
        if constant is not None:
            keys = keys.to(torch.promote_types(keys.dtype, constant.dtype)) + constant.unsqueeze(2)
        if rotation is None:
            return keys.to(self.dtype)
        tables = (self.table(table)[..., part, :] for table in rotation)
        return rotate(keys, *(table if table.dim() == 2 else table.unsqueeze(2) for table in tables)).to(self.dtype)

    def table(self, table: Tensor) -> Tensor:
        """cos or sin of the class, broadcastable to [batch_size, count, kv_len, rotary_dim]."""
        if table.dim() < 4:
            return table if table.dim() == 2 else table.unsqueeze(1)
        return table[:, self.cls.start : self.cls.start + self.cls.count] if table.shape[1] > 1 else table


class AbsorbedQueries:
    """Logits where one block holds all positions: absorbed queries times latents."""

    def __init__(self, query: Tensor, side: ClassRows) -> None:
        parameters, cls = side.parameters, side.cls
        self.queries = absorbed_queries(query, parameters, cls).to(side.wide)
        self.shape, self.per_key = self.queries.shape[:4], cls.count * cls.key.width
        self.extra = None
        # A soft cap sees what is added to all logits of a query, and so do exact keys, to which it is not added.
        if parameters.softcap is not None or parameters.layout.exact is not None:
            self.extra = _constant_logits(query, parameters, cls)

    def __call__(self, latents: Tensor, part: slice, active: slice) -> Tensor:
        """[batch_size, count, heads of a group, active queries, keys], unscaled."""
        queries = self.queries[..., active, :]
        logits = (queries.flatten(2, 3) @ latents.mT).unflatten(2, queries.shape[2:4])
        return logits if self.extra is None else logits + self.extra[..., active, :]


class AbsorbedBlocks:
    """Logits of rotated queries over keys in blocks of positions: queries absorbed once a block, times latents."""

    def __init__(self, query: Tensor, side: ClassRows, rotation: Rotation) -> None:
        parameters, cls, layout = side.parameters, side.cls, side.parameters.layout
        assert layout.rope_block is not None
        self.block, self.per_key = layout.rope_block, cls.count * cls.key.width
        # [batch_size, count, group_size, heads of a KV head, seq_len, head_dim]
        queries = query[:, parameters.heads(cls)].unflatten(1, (cls.count, layout.group_size, -1)).to(side.wide)
        self.shape = (len(query), cls.count, queries.shape[2] * queries.shape[3], queries.shape[4])
        basis, constant = parameters.basis(cls), parameters.constant(cls)
        self.has_constant = constant is not None
        columns = basis if constant is None else torch.cat([basis, constant.to(basis.dtype).unsqueeze(-1)], dim=-1)
        starts = (table[..., :: self.block, :].to(side.wide) for table in rotation)
        cos, sin = (table if table.dim() == 2 else table[:, None, None, None, None] for table in starts)
        rotated = rotate(queries.unsqueeze(-2), cos, -sin).flatten(3, 5)
        absorbed = rotated @ columns.to(side.wide)  # a block's constant logit in the last column
        absorbed = absorbed.unflatten(3, (*queries.shape[3:5], -1)).flatten(2, 3).flatten(2, 3)
        self.absorbed = absorbed.transpose(2, 3)  # [batch_size, count, blocks, heads * seq_len, width]

    def __call__(self, latents: Tensor, part: slice, active: slice) -> Tensor:
        """[batch_size, count, heads of a group, active queries, keys], unscaled."""
        count = latents.shape[2]
        if count % self.block:
            latents = functional.pad(latents, (0, 0, 0, -count % self.block))
        latents = latents.unflatten(2, (-1, self.block))
        absorbed = self.absorbed[:, :, part.start // self.block :][:, :, : latents.shape[2]]
        logits = absorbed[..., : latents.shape[-1]] @ latents.mT
        if self.has_constant:
            logits += absorbed[..., -1:]
        return logits.transpose(2, 3).flatten(3)[..., :count].unflatten(2, self.shape[2:])[..., active, :]


class RebuiltKeys:
    """Logits of rotated queries over keys that are rebuilt from latents and rotated.

    Planes are interleaved, so that one complex product rotates them.
    """

    def __init__(self, query: Tensor, side: ClassRows, rotation: Rotation) -> None:
        parameters, cls, layout = side.parameters, side.cls, side.parameters.layout
        self.planes, self.size, self.wide = rotation[0].shape[-1] // 2, layout.group_size, side.wide
        plane = torch.arange(self.planes, device=query.device)
        both = torch.stack([plane, plane + self.planes], dim=-1).flatten()
        order = torch.cat([both, torch.arange(2 * self.planes, parameters.shape.head_dim, device=query.device)])
        # [batch_size, count, group_size, heads of a KV head, seq_len, head_dim]
        queries = query[:, parameters.heads(cls)].unflatten(1, (cls.count, self.size, -1)).to(self.wide)
        self.shape = (len(query), cls.count, queries.shape[2] * queries.shape[3], queries.shape[4])
        self.queries = queries[..., order]
        basis, constant = parameters.basis(cls), parameters.constant(cls)
        self.dtype = product_dtype(side.dtype)
        self.basis = basis[:, :, order].flatten(1, 2).mT.to(self.dtype)  # [count, width, group_size * head_dim]
        self.constant = None if constant is None else constant[..., order].to(self.wide)[:, None]
        self.rotation = [side.table(table)[..., : self.planes] for table in rotation]
        self.per_key = cls.count * max(cls.key.width, self.basis.shape[-1])

    def __call__(self, latents: Tensor, part: slice, active: slice) -> Tensor:
        """[batch_size, count, heads of a group, active queries, keys], unscaled."""
        queries = self.queries[..., active, :]
        keys = self._keys(latents, part).permute(0, 1, 3, 4, 2)  # [batch_size, count, group_size, head_dim, keys]
        return (queries.flatten(3, 4) @ keys).unflatten(3, queries.shape[3:5]).flatten(2, 3)

    def _keys(self, latents: Tensor, part: slice) -> Tensor:
        """[batch_size, count, keys, group_size, head_dim]."""
        keys = (latents.to(self.dtype) @ self.basis).to(self.wide).unflatten(-1, (self.size, -1))
        if self.constant is not None:
            keys += self.constant
        planes = torch.view_as_complex(keys[..., : 2 * self.planes].unflatten(-1, (-1, 2)))
        rotation = torch.complex(*(table[..., part, :].to(self.wide) for table in self.rotation))
        planes.mul_(rotation.unsqueeze(-2))
        return keys


Logits = AbsorbedQueries | AbsorbedBlocks | RebuiltKeys
"""Ways to the logits of a class over a part of its rows."""


def _constant_logits(query: Tensor, parameters: AttentionParameters, cls: GroupClass) -> Tensor | None:
    """Unscaled logits of the constant keys, which are added for every key, [batch_size, count, heads, seq_len, 1]."""
    constant = parameters.constant(cls)
    if constant is None:
        return None
    heads = query[:, parameters.heads(cls)].unflatten(1, (cls.count, parameters.layout.group_size, -1))
    dtype = torch.promote_types(heads.dtype, constant.dtype)
    return torch.einsum("bngpsd,ngd->bngps", heads.to(dtype), constant.to(dtype)).flatten(2, 3).unsqueeze(-1)
