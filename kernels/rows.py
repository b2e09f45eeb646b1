"""The rows of a layer: those of its groups side by side, in plain PyTorch; `rotor.checkpoint.rows` has those of one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rotor.checkpoint.layout import LayerLayout
from rotor.checkpoint.projections import CompressedProjections
from rotor.checkpoint.rows import Row, RowScale


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
