"""A compressed layer as attention sees it: its parameters, by classes of groups, and its rows in plain PyTorch.

`rotor.checkpoint.rows` has the rows of one group; those of a layer lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rotor.checkpoint.layout import AttentionShape, GroupClass, LayerLayout
from rotor.checkpoint.projections import CompressedProjections
from rotor.checkpoint.rows import Row, RowScale


@dataclass(frozen=True, eq=False)
class AttentionParameters:
    """A layer without its queries and rows.

    layout, shape: what the layer stores, and the sizes of the uncompressed model.
    scaling: factor on the logits, the uncompressed model's.
    query_basis: [group_size * head_dim, key_width]; None in a model without RoPE.
    key_constant: [num_kv_heads, head_dim], float32, in the order of the layout: added to what is read of stored keys;
        None without codes, and in a model without RoPE.
    softcap: bound of the logits before the mask, or None.
    key_basis: [group_size * head_dim, key_rank], key_shift: [key_rank] float32: map new keys into latents; None where
        they are folded into k_proj.
    value_basis: [group_size * head_dim, value rank], value_shift: [value rank] float32: map new values into latents.
    output_basis: [group_size * head_dim, value_width], value_constant: [num_kv_heads, head_dim] float32: map what
        attention over rows puts out to the values of each head. These four only in a layer with exact tokens.
    sinks: [num_heads], in the order of the layout: a logit of each query head without a key; None in most models.
    scale: how latents of joint groups are scaled and coded; None of others.
    """

    layout: LayerLayout
    shape: AttentionShape
    scaling: float
    query_basis: Tensor | None = None
    key_constant: Tensor | None = None
    softcap: float | None = None
    key_basis: Tensor | None = None
    key_shift: Tensor | None = None
    value_basis: Tensor | None = None
    value_shift: Tensor | None = None
    output_basis: Tensor | None = None
    value_constant: Tensor | None = None
    scale: RowScale | None = None
    sinks: Tensor | None = None

    @property
    def heads_per_group(self) -> int:
        """Query heads of a group."""
        return self.layout.group_size * self.shape.heads_per_kv

    def heads(self, cls: GroupClass) -> slice:
        """The query heads of a class, in the order of the layout."""
        return slice(cls.start * self.heads_per_group, (cls.start + cls.count) * self.heads_per_group)

    def value_rows(self, key: Tensor, value: Tensor) -> Tensor:
        """The rows that values are read from."""
        return self.layout.values_from(key, value)

    def meets_latents(self, cls: GroupClass) -> bool:
        """Tell whether prompts attend to the latents of keys as they are stored; see LayerLayout.meets_latents."""
        return self.layout.meets_latents(cls.key, self.shape)

    def basis(self, cls: GroupClass) -> Tensor:
        """The query bases of a class, [count, group_size, head_dim, width]; a view."""
        assert self.query_basis is not None
        columns = self.query_basis[:, cls.key_column : cls.key_column + cls.count * cls.key.width]
        columns = columns.unflatten(-1, (cls.count, cls.key.width)).transpose(0, 1)
        return columns.unflatten(1, (self.layout.group_size, -1))

    def output_bases(self) -> list[Tensor]:
        """The output bases of each class, [count, group_size, head_dim, width]; views."""
        assert self.output_basis is not None
        classes = list(self.layout.classes())
        columns = self.output_basis.split([cls.count * cls.value.width for cls in classes], dim=-1)
        return [
            basis.unflatten(-1, (cls.count, -1)).unflatten(0, (self.layout.group_size, -1)).permute(2, 0, 1, 3)
            for cls, basis in zip(classes, columns, strict=True)
        ]

    def constant(self, cls: GroupClass) -> Tensor | None:
        """The constant keys of a class, [count, group_size, head_dim]; a view."""
        size = self.layout.group_size
        if self.key_constant is None:
            return None
        return self.key_constant[cls.start * size : (cls.start + cls.count) * size].unflatten(0, (cls.count, size))

    def mask(self, mask: Tensor | None, heads: slice) -> Tensor | None:
        """Select the part of a mask that belongs to some query heads in the order of the layout.

        Args:
            mask: [batch_size or 1, num_heads or 1, ...], heads in the order of the uncompressed model.
        """
        if mask is None or mask.shape[1] == 1:
            return mask
        each = self.shape.heads_per_kv
        order = torch.tensor(self.layout.kv_head_order)[:, None] * each + torch.arange(each)
        return mask[:, order.flatten()[heads].to(mask.device)]


def seq_len_of(query: Tensor) -> int:
    """Tokens of queries [batch_size, num_heads, seq_len, head_dim], or absorbed [batch_size, seq_len, ...]."""
    return query.shape[1 if query.dim() == 3 else 2]


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Mask logits [batch_size, count, heads of a group, seq_len, kv_len] by a mask [batch_size, 1 or heads, ...].

    A mask is bool (True: attend) or added.
    """
    if mask is None:
        return logits
    if mask.dim() == 4:
        mask = mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else logits.shape[1:3])
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def shown_by(mask: Tensor) -> Tensor:
    """Tell which keys a mask shows, bool; one that is added hides by the least number of its dtype, or infinity."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def scaled_and_capped(logits: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Scale products of queries and keys, and bound them if the model has a soft cap."""
    logits = logits * scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def row_scale(tensors: CompressedProjections) -> RowScale | None:
    """Scale and code of a layer's latents, where their rows have a scale; of all groups side by side."""
    if tensors.code_shift is None or tensors.length_weight is None:
        return None
    return RowScale(tensors.code_shift, tensors.length_weight)


def pack_layer(latents: Tensor, layout: LayerLayout, keys: bool, scale: RowScale | None = None) -> Tensor:
    """Pack the key row, or the value row, of a layer.

    Args:
        latents: [..., at least the sum of ranks], groups side by side, as projections put them out.
        keys: the key latents, else the value latents: an empty row where these are in the keys'.
        scale: of scaled rows.
    Returns:
        [..., bytes of the row], uint8; of a layer of numbers `latents` as they are.
    """
    latents = latents[..., : layout.key_rank if keys else layout.stored_value_rank]
    if not layout.coded:
        return latents
    if not latents.shape[-1]:
        return latents.to(torch.uint8)
    rows, first = [], 0
    for cls in layout.classes():
        row, stride = (cls.key, cls.key_stride) if keys else (cls.value, cls.value_stride)
        channels = slice(first, first + cls.count * row.rank)
        of_class = RowScale(*(part[channels].view(cls.count, -1) for part in scale)) if keys and scale else None
        packed = row.pack(latents[..., channels].unflatten(-1, (cls.count, row.rank)), of_class)
        rows.append(_strided(packed, stride))
        first = channels.stop
    return torch.cat(rows, dim=-1)


def row_dtype(layout: LayerLayout, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a layer's rows in a model of a dtype."""
    return torch.uint8 if layout.coded else dtype


def as_loaded(rows: Tensor, layout: LayerLayout) -> Tensor:
    """Rows as kernels load them: words of 16 bits, or numbers."""
    return rows.view(torch.int16) if layout.coded else rows


def resize_layer(rows: Tensor, layout: LayerLayout, to: LayerLayout, keys: bool) -> Tensor:
    """Cut the rows of a layer to the first channels of each latent, or fill them up with the middle of further ones.

    Args:
        rows: key rows, or value rows, of `layout`, [..., elements].
        to: the same groups with latents of other widths.
    """
    if layout == to or not rows.shape[-1]:
        return rows
    resized, size = [], rows.element_size()
    for starts, group, other in zip(layout.byte_offsets(size), layout.groups, to.groups, strict=True):
        row, kept = (group.key, other.key) if keys else (group.values, other.values)
        first = starts[0 if keys else 1] // size
        of_group = row.resized(rows[..., first : first + row.row_bytes(size) // size], kept)
        resized.append(_strided(of_group.unsqueeze(-2), kept.stride(len(to.groups), size) // size))
    return torch.cat(resized, dim=-1)


def read_class(rows: Tensor, row: Row, first_byte: int, stride: int, count: int, dtype: torch.dtype) -> Tensor:
    """Read the latents of the groups of a class as attention multiplies with them.

    Args:
        rows: [..., bytes], uint8, or of numbers [..., width of the layer].
        first_byte, stride: of the class in the row.
    Returns:
        [..., count, width], dtype; of numbers a view.
    """
    size = rows.element_size()
    groups = rows[..., first_byte // size : (first_byte + count * stride) // size].unflatten(
        -1, (count, stride // size)
    )
    return row.unpack(groups[..., : row.row_bytes(size) // size], dtype)


def _strided(packed: Tensor, stride: int) -> Tensor:
    """Lay rows of groups, [..., count, elements], behind each other, `stride` elements from one to the next."""
    return functional.pad(packed, (0, stride - packed.shape[-1])).flatten(-2)
