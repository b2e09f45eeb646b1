"""The channels of rows, each with its tokens side by side: what a file packs, see `row_codec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .rows import NIBBLE_BITS, SIGNED, WIDTHS, WORD_NIBBLES, CodedRow

if TYPE_CHECKING:
    from .layout import LayerLayout

Bytes = npt.NDArray[Any]
"""Bytes, uint8, of whatever shape."""

BYTE_BITS = 8

DAMAGED = "The file is damaged or forged: save the cache again."


class Spot(NamedTuple):
    """A latent in a layer's row, from the byte `first` on."""

    first: int
    row: CodedRow


def spots_of(layout: LayerLayout) -> tuple[Spot, ...]:
    """The latents of a layer of codes, in its key row and the value row behind that."""
    key_bytes, spots = layout.row_bytes(1)[0], []
    for group, (key, value) in zip(layout.groups, layout.byte_offsets(1), strict=True):
        for first, row in zip((key, key_bytes + value), group.latents, strict=False):
            assert isinstance(row, CodedRow)
            spots.append(Spot(first, row))
    return tuple(spots)


class Channels(NamedTuple):
    """Content of the rows of a layer, each channel's tokens side by side. The scale of a row is a channel of 4 bits.

    codes: [channels, tokens], the highest 8 bits of each code at most. low: the other bits of wider ones.
    """

    codes: Bytes
    low: Bytes


def codes_of_byte(bits: int) -> int:
    """Codes that lie in a byte: whole ones."""
    return BYTE_BITS // bits


class Widths:
    """Bits of the channels of a layer's latents.

    bits: [channels], of `Channels.codes`. classes: the channels of so many bits. low: lines of `Channels.low`.
    """

    def __init__(self, spots: Sequence[Spot]) -> None:
        every = [bits for _, row in spots for bits in ((NIBBLE_BITS,) * row.scaled + row.bits)]
        self.bits = np.minimum(every, BYTE_BITS)
        self.classes = {bits: np.flatnonzero(self.bits == bits) for bits in (8, 6, 4, 2)}
        self.low = sum(bits > BYTE_BITS for bits in every)

    def sizes(self, tokens: int) -> list[int]:
        """Bytes of the codes of each class side by side, and of what is low."""
        return [len(channels) * tokens // codes_of_byte(bits) for bits, channels in self.classes.items()] + [
            self.low * tokens
        ]


def unpacked(rows: Bytes, spots: Sequence[Spot]) -> Channels:
    """Unpack the rows of a layer, [tokens, bytes]."""
    lines, codes, low = np.ascontiguousarray(rows.T), [], []
    tokens = len(rows)
    for first, row in spots:
        words = lines[first : first + row.row_bytes()].reshape(row.words, 2, tokens)
        slots = np.concatenate([words[:, 0] & 15, words[:, 0] >> 4, words[:, 1] & 15, words[:, 1] >> 4])
        crumbs = _crumbs(slots, row)
        codes.append(slots[: row.scaled])
        start = int(row.scaled)
        for bits, count in zip(WIDTHS, row.counts, strict=True):
            nibbles = bits // NIBBLE_BITS
            digits = slots[start : start + count * nibbles].reshape(count, nibbles, tokens)
            start += count * nibbles
            if bits == 2:
                codes.append(crumbs[row.n6 : row.n6 + count])
            elif bits == 4:
                codes.append(digits[:, 0])
            elif bits == 6:
                codes.append(digits[:, 0] << 2 | crumbs[:count])
            else:
                codes.append(digits[:, 0] << 4 | digits[:, 1])
            if bits == 12:
                low.append(digits[:, 2])
            elif bits == 16:
                low.append(digits[:, 2] << 4 | digits[:, 3])
    return Channels(np.concatenate(codes), np.concatenate(low))


def packed(channels: Channels, spots: Sequence[Spot], width: int) -> Bytes:
    """Pack rows of so many bytes again, [tokens, width]; what belongs to no latent is 0."""
    tokens = channels.codes.shape[1]
    lines = np.zeros((width, tokens), np.uint8)
    taken = low_taken = 0
    for first, row in spots:
        count = row.rank + row.scaled
        slots, used = _slots_of(channels.codes[taken : taken + count], channels.low[low_taken:], row)
        taken, low_taken = taken + count, low_taken + used
        lanes = slots.reshape(WORD_NIBBLES, row.words, tokens)
        words = lines[first : first + row.row_bytes()].reshape(row.words, 2, tokens)
        words[:, 0] = lanes[0] | lanes[1] << 4
        words[:, 1] = lanes[2] | lanes[3] << 4
    return _transposed(lines)


def _crumbs(slots: Bytes, row: CodedRow) -> Bytes:
    """The crumbs of a row in the order of their channels, from the slots that are cut, which are the last."""
    cut = -(-(row.n6 + row.n2) // 2)
    nibbles = slots[len(slots) - cut :]
    return np.stack([nibbles >> 2, nibbles & 3], axis=1).reshape(2 * cut, slots.shape[1])


def _slots_of(codes: Bytes, low: Bytes, row: CodedRow) -> tuple[Bytes, int]:
    """The slots of a row, and how many lines of `low` they took."""
    slots = np.full((WORD_NIBBLES * row.words, codes.shape[1]), SIGNED, np.uint8)
    slots[: row.scaled] = codes[: row.scaled]
    place = start = int(row.scaled)
    used, crumbs = 0, []
    for bits, count in zip(WIDTHS, row.counts, strict=True):
        whole = codes[place : place + count]
        digits: list[Bytes] = [whole] if bits == 4 else [whole >> 2] if bits == 6 else []
        if bits >= BYTE_BITS:
            digits = [whole >> 4, whole & 15]
        if bits > BYTE_BITS:
            rest = low[used : used + count]
            digits += [rest] if bits == 12 else [rest >> 4, rest & 15]
            used += count
        if bits in (2, 6):
            crumbs.append(whole & 3)
        for number, digit in enumerate(digits):
            slots[start + number : start + count * len(digits) : len(digits)] = digit
        place, start = place + count, start + count * len(digits)
    every = np.concatenate(crumbs)
    cut = -(-len(every) // 2)
    nibbles = slots[len(slots) - cut :]
    nibbles[:] = every[::2] << 2
    nibbles[: len(every) // 2] |= every[1::2]
    return slots, used


def _transposed(lines: Bytes) -> Bytes:
    import torch  # which is several times faster at it

    transposed: Bytes = torch.from_numpy(lines).t().contiguous().numpy()
    return transposed


def side_by_side(codes: Bytes, bits: int) -> Bytes:
    """Neighbouring tokens' codes in one byte, the first lowest; [channels, tokens] of codes of 4 or 2 bits."""
    import torch  # numpy is several times slower at it

    if bits > NIBBLE_BITS or not codes.size:
        return codes
    words = torch.from_numpy(codes).view(torch.int16 if bits == NIBBLE_BITS else torch.int32)
    together = words.clone()
    for number in range(1, codes_of_byte(bits)):
        together |= words >> (BYTE_BITS - bits) * number
    packed_codes: Bytes = together.to(torch.uint8).numpy()
    return packed_codes


def apart(data: Bytes, bits: int, tokens: int) -> Bytes:
    """The codes again, [channels, tokens]."""
    import torch

    if bits > NIBBLE_BITS or not data.size:
        return data.reshape(-1, tokens)
    dtype, mask = (torch.int16, 0x0F0F) if bits == NIBBLE_BITS else (torch.int32, 0x03030303)
    together = torch.from_numpy(data.copy()).to(dtype)
    words = together.clone()
    for number in range(1, codes_of_byte(bits)):
        words |= together << (BYTE_BITS - bits) * number
    codes: Bytes = words.bitwise_and_(mask).numpy().view(np.uint8)
    return codes.reshape(-1, tokens)
