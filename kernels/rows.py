"""Pack latents into rows and unpack them, in plain PyTorch; `rotor.checkpoint.channels` says what a row is."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rotor.checkpoint.channels import (
    NIBBLE_BITS,
    SCALE,
    SCALE_LARGEST,
    SCALE_MIDDLE,
    SCALE_STEPS,
    SIGNED,
    WORD_PLANES,
    Channels,
    Digit,
    Latent,
    Numbers,
    Parted,
    aligned,
)
from rotor.checkpoint.layout import LayerLayout
from rotor.checkpoint.projections import CompressedProjections

SIGN_BITS = 0x8888 - (1 << 16)
"""The highest bit of each nibble of a word."""


class CodeScales(NamedTuple):
    """How the latents of joint groups are coded, see `rotor.checkpoint.tensors.layer_tensors`.

    shift, length: [rank], float32, of a layer or a group. errors: flat, of a layer; of a group [fast rank, rank of the
    rest]; None where no plane is fast.
    """

    shift: Tensor
    length: Tensor
    errors: Tensor | None


def code_scales(tensors: CompressedProjections) -> CodeScales | None:
    """How a layer's latents are coded, where their rows have a scale."""
    if tensors.code_shift is None or tensors.length_weight is None:
        return None
    return CodeScales(tensors.code_shift, tensors.length_weight, tensors.error_basis)


def pack(latents: Tensor, channels: Channels) -> Tensor:
    """Floor, clamp and pack the latents of a group.

    Args:
        latents: [..., rank], (z - mean) / scale of each channel, as projections put them out.
    Returns:
        [..., bytes], uint8.
    """
    return pack_codes(_codes(_wide(latents), channels), channels)


def pack_parted(latents: Tensor, parted: Parted, scales: CodeScales) -> Tensor:
    """Choose the scale of a row, code fast latents, then the rest by their errors, and pack them.

    Args:
        latents: [..., rank], as projections put them out. scales: of the group.
    Returns:
        [..., bytes], uint8.
    """
    codes, nibble = parted_codes(latents, parted, scales)
    rows, first = [], 0
    for part in parted.parts:
        of_part = codes[..., first : first + part.rank]
        rows.append(pack_codes(of_part, part, nibble if part.scaled else None))
        first += part.rank
    return torch.cat(rows, dim=-1)


def parted_codes(latents: Tensor, parted: Parted, scales: CodeScales) -> tuple[Tensor, Tensor]:
    """Codes [..., rank] and the nibble of the scale [..., 1] of what `pack_parted` packs, int32."""
    wide = _wide(latents)
    shift, length = (tensor.to(wide.dtype) for tensor in scales[:2])
    half = torch.cat([_slots_of(part, wide.device).half for part in parted.parts]).to(wide.dtype)

    def lost(scale: Tensor) -> Tensor:
        """The rest counts as it is before errors of fast codes move it."""
        return lost_by(wide / scale.to(wide.dtype) + shift, half).unsqueeze(-1)

    nibble = chosen_nibble((wide.square() * length).sum(-1, keepdim=True), lost)
    scaled = wide / scale_of(nibble).to(wide.dtype) + shift
    fast, rest = scaled[..., : parted.fast_rank], scaled[..., parted.fast_rank :]
    codes, first = [], 0
    for part in parted.fast:
        codes.append(_codes(fast[..., first : first + part.rank], part))
        first += part.rank
    if scales.errors is not None:
        errors = torch.cat(codes, dim=-1) - half[: parted.fast_rank] + 0.5 - fast
        rest = rest + errors.to(wide.dtype) @ scales.errors.to(wide.dtype)
    return torch.cat([*codes, _codes(rest, parted.rest)], dim=-1), nibble


def chosen_nibble(energy: Tensor, lost: Callable[[Tensor], Tensor]) -> Tensor:
    """The nibble of the scale of a row, int32: by its length, or the next larger one if codes lose less by it.

    A few latents far beyond their levels can cost more than coarser steps of all.

    Args:
        energy: see `scale_nibble`. lost: squared error of a row's codes by a scale, in squared steps, see `lost_by`.
    """
    nibble = scale_nibble(energy)

    def cost(nibble: Tensor) -> Tensor:
        scale = scale_of(nibble)
        return scale.square() * lost(scale)

    return nibble + ((cost(nibble + 1) < cost(nibble)) & (nibble < SCALE_LARGEST)).int()


def lost_by(levels: Tensor, half: Tensor) -> Tensor:
    """Squared error of codes, in squared steps: a twelfth of each, and the square of what is beyond the last level.

    Args:
        levels: [..., channels], latents in steps from the middle of all levels. half: [channels], half the number of
            levels.
    Returns:
        [...].
    """
    return ((levels.abs() - half + 0.5).clamp(min=0).square() + 1 / 12).sum(-1)


def scale_nibble(energy: Tensor) -> Tensor:
    """The nibble of the scale of a row whose latents have this weighted mean square, int32: the scale by its length."""
    steps = energy.clamp(min=2.0**-SCALE_MIDDLE).log2().mul(SCALE_STEPS / 2).round() + SCALE_MIDDLE
    return steps.clamp(0, SCALE_LARGEST).to(torch.int32)


def scale_of(nibble: Tensor) -> Tensor:
    """The scale of a nibble, float32."""
    return torch.exp2((nibble - SCALE_MIDDLE).float() / SCALE_STEPS)


def _wide(latents: Tensor) -> Tensor:
    return latents.to(torch.promote_types(latents.dtype, torch.float32))


def _codes(latents: Tensor, channels: Channels) -> Tensor:
    """Floor and clamp the latents of a group, [..., rank], to codes, int32."""
    half = _slots_of(channels, latents.device).half
    return (latents.floor().clamp(-half, half - 1) + half).to(torch.int32)


def pack_codes(codes: Tensor, channels: Channels, scale: Tensor | None = None) -> Tensor:
    """Pack the codes of a group's channels, [..., rank] int32, into rows, [..., bytes] uint8.

    Args:
        scale: [..., 1], int32, the nibble of the scale of a row that has one.
    """
    slots = _slots_of(channels, codes.device)
    empty = codes.new_tensor([SIGNED, 0]).expand(*codes.shape[:-1], 2)
    codes = torch.cat([codes, empty] if scale is None else [codes, empty, scale], dim=-1)
    nibbles = (codes[..., slots.channel] >> slots.bit).bitwise_and_(slots.mask)
    if slots.crumb is not None:
        first = slots.first
        nibbles[..., first:] = nibbles[..., first:] << 2 | codes[..., slots.crumb].bitwise_and_(3)
    planes = nibbles.unflatten(-1, (WORD_PLANES, -1))
    low, high = (planes[..., byte, :] | planes[..., byte + 1, :] << 4 for byte in (0, 2))
    return torch.stack([low, high], dim=-1).to(torch.uint8).flatten(-2)


def unpack_codes(rows: Tensor, channels: Channels) -> Tensor:
    """Unpack what `pack_codes` packed."""
    words = rows.contiguous().view(torch.int16).to(torch.int32)
    nibbles = torch.cat([words >> 4 * plane & 15 for plane in range(WORD_PLANES)], dim=-1)
    codes = nibbles.new_zeros(*rows.shape[:-1], channels.rank)
    for slot, digits in enumerate(channels.slots):
        nibble = nibbles[..., slot]
        for number, digit in enumerate(digits):
            if digit.channel == SCALE:
                continue
            bits = nibble if digit.bits == NIBBLE_BITS else nibble >> 2 if number == 0 else nibble & 3
            codes[..., digit.channel] += bits << digit.bit
    return codes


def unpack_parted(rows: Tensor, parted: Parted, dtype: torch.dtype) -> Tensor:
    """Unpack rows of a joint group, [..., bytes] uint8, to what attention multiplies with: operands times the scale.

    The operand in the scale's slot is the scale itself. [..., width].
    """
    operands = unpack(rows, parted.split, torch.promote_types(dtype, torch.float32))
    place = parted.scale_word
    scale = scale_of(operands[..., place : place + 1] + SIGNED).to(operands.dtype)
    operands[..., place] = 1.0
    return operands.mul_(scale).to(dtype)


def unpack(rows: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    """Unpack rows of a group, [..., bytes] uint8, to nibbles and the crumbs of split planes, less 8, [..., width]."""
    words = rows.contiguous().view(torch.int16)
    signed = words ^ SIGN_BITS  # a nibble less 8 in two's complement
    planes = [signed << 12 - 4 * plane >> 12 for plane in range(WORD_PLANES)]
    planes += [(words >> 4 * plane & 3) - SIGNED for plane in reversed(range(WORD_PLANES - split, WORD_PLANES))]
    return torch.cat(planes, dim=-1).to(dtype)


def pack_layer(latents: Tensor, layout: LayerLayout, keys: bool, scales: CodeScales | None = None) -> Tensor:
    """Pack the key row, or the value row, of a layer.

    Args:
        latents: [..., at least the sum of ranks], groups side by side, as projections put them out.
        keys: the key latents, else the value latents: an empty row where these are in the keys'.
        scales: how joint groups are coded.
    Returns:
        [..., bytes of the row], uint8; of a layer of numbers `latents` as they are.
    """
    latents = latents[..., : layout.key_rank if keys else layout.stored_value_rank]
    if not layout.coded:
        return latents
    if not latents.shape[-1]:
        return latents.to(torch.uint8)
    if layout.scaled:
        assert scales is not None
        return _pack_joint(latents, layout, scales)
    rows, first = [], 0
    for cls in layout.classes():
        latent, stride = (cls.key, cls.key_stride) if keys else (cls.value, cls.value_stride)
        assert isinstance(latent, Channels)
        of_class = latents[..., first : first + cls.count * latent.rank].unflatten(-1, (cls.count, latent.rank))
        rows.append(_strided(pack(of_class, latent), stride))
        first += cls.count * latent.rank
    return torch.cat(rows, dim=-1)


def _pack_joint(latents: Tensor, layout: LayerLayout, scales: CodeScales) -> Tensor:
    rows, channel, product = [], 0, 0
    for group in layout.groups:
        parted = group.key
        assert isinstance(parted, Parted)
        own, size = slice(channel, channel + parted.rank), parted.fast_rank * parted.rest.rank
        errors = None
        if scales.errors is not None:
            errors = scales.errors[product : product + size].view(parted.fast_rank, parted.rest.rank)
        packed = pack_parted(latents[..., own], parted, CodeScales(scales.shift[own], scales.length[own], errors))
        rows.append(functional.pad(packed, (0, parted.stride(len(layout.groups), 2) - packed.shape[-1])))
        channel, product = own.stop, product + size
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
        latent, kept = (group.key, other.key) if keys else (group.values, other.values)
        first = starts[0 if keys else 1] // size
        of_group = rows[..., first : first + latent.row_bytes(size) // size]
        if isinstance(latent, Numbers) or isinstance(kept, Numbers):
            resized.append(functional.pad(of_group, (0, kept.width - latent.width)))
        else:
            packed = _resized_row(of_group, latent, kept)
            resized.append(_strided(packed.unsqueeze(-2), aligned(kept.row_bytes(), len(to.groups))))
    return torch.cat(resized, dim=-1)


def _resized_row(rows: Tensor, latent: Channels | Parted, kept: Channels | Parted) -> Tensor:
    """Rows of a group, [..., bytes], with the channels of another latent."""
    if isinstance(latent, Parted) and isinstance(kept, Parted):
        sizes = [part.row_bytes() for part in latent.parts]
        parts = zip(rows.split(sizes, -1), latent.parts, kept.parts, strict=True)
        return torch.cat([_resized_row(row, *both) for row, *both in parts], dim=-1)
    assert isinstance(latent, Channels)
    assert isinstance(kept, Channels)
    scale = rows[..., :1].bitwise_and(15).int() if latent.scaled else None
    return pack_codes(_resized(unpack_codes(rows, latent), kept), kept, scale)


def read_class(rows: Tensor, latent: Latent, first_byte: int, stride: int, count: int, dtype: torch.dtype) -> Tensor:
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
    if isinstance(latent, Numbers):
        return groups
    own = groups[..., : latent.row_bytes()]
    return unpack_parted(own, latent, dtype) if isinstance(latent, Parted) else unpack(own, latent.split, dtype)


def _resized(codes: Tensor, to: Channels) -> Tensor:
    """Cut codes to the first channels, or fill them up with the middle of further ones."""
    half = torch.tensor([1 << bits - 1 for bits in to.bits[codes.shape[-1] :]], device=codes.device, dtype=codes.dtype)
    return torch.cat([codes[..., : to.rank], half.expand(*codes.shape[:-1], -1)], dim=-1)


def _strided(packed: Tensor, stride: int) -> Tensor:
    """Lay rows of groups, [..., count, bytes], behind each other, `stride` bytes from one to the next."""
    return functional.pad(packed, (0, stride - packed.shape[-1])).flatten(-2)


class _Slots(NamedTuple):
    """The slots of a latent as tensors.

    half: half the number of codes of each channel. channel, bit, mask: of the digit in each slot; the channel of an
    empty slot is `rank`, of the scale `rank + 2`. first: the first slot that is cut. crumb: channels of the lower
    crumbs from there on, `rank + 1` where one is missing; None if no slot is cut.
    """

    half: Tensor
    channel: Tensor
    bit: Tensor
    mask: Tensor
    first: int
    crumb: Tensor | None


@lru_cache(maxsize=4096)
def _slots_of(channels: Channels, device: torch.device) -> _Slots:
    half = torch.tensor([2.0 ** (bits - 1) for bits in channels.bits], device=device)
    highest = [digits[0] if digits else Digit(channels.rank, 0, NIBBLE_BITS) for digits in channels.slots]
    highest = [digit._replace(channel=channels.rank + 2) if digit.channel == SCALE else digit for digit in highest]
    digits = torch.tensor([(digit.channel, digit.bit, 2**digit.bits - 1) for digit in highest], device=device)
    cut = [own for own in channels.slots if own and own[0].bits < NIBBLE_BITS]
    crumb = [own[1].channel if len(own) > 1 else channels.rank + 1 for own in cut]
    channel, bit, mask = digits.unbind(1)
    lower = torch.tensor(crumb, device=device) if crumb else None
    return _Slots(half, channel, bit.int(), mask.int(), len(highest) - len(cut), lower)
