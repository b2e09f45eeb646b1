"""Latents into rows of nibbles and back, in plain PyTorch: see `rotor.format.channels` for what a row is."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from rotor.format.channels import SIGNED, Channels, Latent, aligned
from rotor.format.layout import LayerLayout

PLANES_A_WORD = 4
SIGN_BITS = 0x8888 - (1 << 16)
"""The highest bit of each nibble of a word."""


def pack(latents: Tensor, channels: Channels) -> Tensor:
    """Floor, clamp, cut into nibbles and pack the latents of a group.

    Args:
        latents: [..., rank], (z - mean) / scale of each channel, as projections put them out.
    Returns:
        [..., width / 2], uint8.
    """
    half, channel, shift = _places(channels, latents.device)
    wide = latents.to(torch.promote_types(latents.dtype, torch.float32))
    codes = (wide.floor().clamp(-half, half - 1) + half).to(torch.int32)
    codes = torch.cat([codes, codes.new_full((*codes.shape[:-1], 1), SIGNED)], dim=-1)  # what an empty place holds
    return pack_nibbles((codes[..., channel] >> shift).bitwise_and_(15))


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Nibbles by place, [..., width], unsigned, as bytes [..., width / 2]."""
    planes = nibbles.unflatten(-1, (PLANES_A_WORD, -1))
    low, high = (planes[..., byte, :] | planes[..., byte + 1, :] << 4 for byte in (0, 2))
    return torch.stack([low, high], dim=-1).to(torch.uint8).flatten(-2)


def unpack_nibbles(rows: Tensor) -> Tensor:
    """What `pack_nibbles` packed, less 8, int16."""
    words = rows.contiguous().view(torch.int16) ^ SIGN_BITS  # a nibble less 8 in two's complement
    return torch.cat([words << 12 - 4 * plane >> 12 for plane in range(PLANES_A_WORD)], dim=-1)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., width / 2], uint8, of one group -> its signed nibbles, [..., width] in `dtype`."""
    return unpack_nibbles(rows).to(dtype)


def pack_layer(latents: Tensor, layout: LayerLayout, keys: bool) -> Tensor:
    """The key (or value) row of a layer.

    Args:
        latents: [..., sum of ranks], groups side by side.
        keys: the key latents, else the value latents, of which joint ones are none.
    Returns:
        [..., bytes of the row], uint8; of a layer of numbers `latents` as they are.
    """
    if not layout.coded:
        return latents
    rows, first = [], 0
    for cls in layout.classes():
        latent, stride = (cls.key, cls.key_stride) if keys else (cls.value, cls.value_stride)
        if not keys and layout.joint:
            continue
        assert isinstance(latent, Channels)
        own = latents[..., first : first + cls.count * latent.rank].unflatten(-1, (cls.count, latent.rank))
        rows.append(_strided(pack(own, latent), stride))
        first += cls.count * latent.rank
    return torch.cat(rows, dim=-1) if rows else latents.new_empty(*latents.shape[:-1], 0, dtype=torch.uint8)


def resize_layer(rows: Tensor, layout: LayerLayout, to: LayerLayout, keys: bool) -> Tensor:
    """The rows of a layer with the first places of each latent alone, or with empty places behind them.

    Args:
        rows: [..., elements, of codes bytes], of `layout`: keys', or values'.
        to: the same groups with latents of other widths.
    """
    if layout == to or not rows.shape[-1]:
        return rows
    found, size = [], rows.element_size()
    for starts, group, other in zip(layout.byte_offsets(size), layout.groups, to.groups, strict=True):
        latent, kept = (group.key, other.key) if keys else (group.values, other.values)
        first, length = starts[0 if keys else 1] // size, latent.width // 2 if latent.coded else latent.width
        own, more = rows[..., first : first + length], (0, kept.width - latent.width)
        if latent.coded:
            packed = pack_nibbles(functional.pad(unpack_nibbles(own), more) + SIGNED)
            found.append(_strided(packed.unsqueeze(-2), aligned(kept.width, len(to.groups))))
        else:
            found.append(functional.pad(own, more))
    return torch.cat(found, dim=-1)


def read_class(rows: Tensor, latent: Latent, first_byte: int, stride: int, count: int, dtype: torch.dtype) -> Tensor:
    """What attention multiplies with of the groups of a class.

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
    return unpack(groups[..., : latent.width // 2], dtype) if latent.coded else groups


def _strided(packed: Tensor, stride: int) -> Tensor:
    """Rows of groups, [..., count, bytes], behind each other with so many bytes from one to the next."""
    return functional.pad(packed, (0, stride - packed.shape[-1])).flatten(-2)


@lru_cache(maxsize=4096)
def _places(channels: Channels, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Half the codes of each channel, [rank]; of each place its channel (rank: an empty one) and its shift, [width]."""
    half = torch.tensor([2.0 ** (bits - 1) for bits in channels.bits], device=device)
    places = [(channels.rank, 0) if place is None else (place[0], 4 * place[1]) for place in channels.nibbles]
    channel, shift = torch.tensor(places, device=device).unbind(1)
    return half, channel, shift.to(torch.int32)
