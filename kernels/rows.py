"""Latents into rows of bytes and back, in plain PyTorch: see `rotor.columns` for what a row is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

import torch
from torch import Tensor

from rotor.format.columns import Columns
from rotor.format.layout import LayerLayout


def pack(latents: Tensor, columns: Columns) -> Tensor:
    """Floor, clamp and pack the latents of a group.

    Args:
        latents: [..., rank], in the model's dtype, as its projections put them out: (z - m) / s for a coded column.
    Returns:
        [..., row bytes], uint8.
    """
    return torch.cat(
        [
            _packed(latents[..., s.first : s.first + s.count], s.bits) if s.bits < 16
            else latents[..., s.first : s.first + s.count].contiguous().view(torch.uint8)
            for s in columns.segments(latents.element_size())
        ],
        dim=-1,
    )  # fmt: skip


def unpack(rows: Tensor, columns: Columns, dtype: torch.dtype) -> Tensor:
    """The numbers that attention multiplies with: code - 2^(bits - 1), and the columns of 16 bits themselves.

    Args:
        rows: [..., row bytes], uint8, written by `pack` from latents of `dtype`.
    Returns:
        [..., rank], dtype.
    """
    numbers = []
    for s in columns.segments(dtype.itemsize):  # copied where wider numbers are seen in it: it may begin at any word
        part = rows[..., s.offset_bytes : s.offset_bytes + s.size_bytes]
        numbers.append(
            _unpacked(part, s.bits, dtype)
            if s.bits < 16
            else part.clone(memory_format=torch.contiguous_format).view(dtype)
        )
    return torch.cat(numbers, dim=-1)


def byte_order(columns: Columns, element_bytes: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """How `unpack_by_bytes` gives the columns: in which order (by bytes and the places in each), by what multiplied."""
    order: list[int] = []
    factors: list[float] = []
    for s in columns.segments(element_bytes):
        factors += [1.0 if s.bits == 16 else 2.0 ** (8 - s.bits)] * s.count
        if s.bits == 16:
            order += range(s.first, s.first + s.count)
            continue
        in_byte = 8 // s.bits
        for byte in range(s.size_bytes):
            word, half, quarter = byte // 4, byte % 4 // 2, byte % 2
            first = s.first + word * 4 * in_byte + 2 * quarter * in_byte + half
            order += range(first, first + 2 * in_byte, 2)
    return tuple(order), tuple(factors)


def unpack_by_bytes(rows: Tensor, columns: Columns, dtype: torch.dtype, numbers: Tensor) -> Tensor:
    """The numbers of `unpack` in the order and with the factors of `byte_order`, by few passes over few bytes.

    Each code becomes the upper end of a byte of its own whose rest is zero: with the highest bit flipped that is its
    number, in two's complement, times what the rest counts.

    Args:
        rows: [..., row bytes], uint8. dtype: of the model.
        numbers: [..., rank], of any dtype that holds them; written and returned.
    """
    bits, sizes_bytes, counts = _segments(columns, dtype.itemsize)
    parts = zip(bits, rows.split_with_sizes(sizes_bytes, -1), numbers.split_with_sizes(counts, -1), strict=True)
    for of_part, part, into in parts:
        into.copy_(part.contiguous().view(dtype).to(into.dtype) if of_part == 16 else _spread_codes(part, of_part))
    return numbers


@lru_cache(maxsize=4096)
def _segments(columns: Columns, element_bytes: int) -> tuple[list[int], list[int], list[int]]:
    """Bits, bytes and columns of each segment."""
    found = list(columns.segments(element_bytes))
    return [s.bits for s in found], [s.size_bytes for s in found], [s.count for s in found]


def _spread_codes(rows: Tensor, bits: int) -> Tensor:
    """[..., n bits / 8] uint8 -> [..., n] int8: the numbers times 2^(8 - bits), in the order of `byte_order`."""
    if bits == 8:
        return (rows.contiguous() ^ 0x80).view(torch.int8)
    if bits == 4:
        words = rows.to(torch.int16)
        places, upper, signs = (words << 4).bitwise_or_(words << 8), 0xF0F0 - (1 << 16), 0x8080 - (1 << 16)
    else:
        words = rows.to(torch.int32)
        # One product makes two places: they do not overlap.
        places = (words * (1 << 6 | 1 << 18)).bitwise_or_(words * (1 << 12 | 1 << 24))
        upper, signs = 0xC0C0C0C0 - (1 << 32), 0x80808080 - (1 << 32)
    return places.bitwise_and_(upper).bitwise_xor_(signs).view(torch.int8)


def pack_layer(latents: Tensor, columns: Sequence[Columns]) -> Tensor:
    """`pack` for the groups of a layer side by side, `columns` being those of each.

    Args:
        latents: [..., sum of ranks].
    Returns:
        [..., row bytes of the layer], uint8.
    """
    rows, first = [], 0
    for of_group, run in groupby(columns):
        count = len(list(run))
        groups = latents[..., first : first + count * of_group.rank].unflatten(-1, (count, of_group.rank))
        rows.append(pack(groups, of_group).flatten(-2))
        first += count * of_group.rank
    return torch.cat(rows, dim=-1) if rows else latents.new_empty(*latents.shape[:-1], 0, dtype=torch.uint8)


def unpack_layer(rows: Tensor, columns: Sequence[Columns], dtype: torch.dtype) -> Tensor:
    """`unpack` for the groups of a layer side by side: [..., row bytes of the layer] -> [..., sum of ranks]."""
    numbers, first = [], 0
    for of_group, run in groupby(columns):
        count, size = len(list(run)), of_group.row_bytes(dtype.itemsize)
        groups = rows[..., first : first + count * size].unflatten(-1, (count, size))
        numbers.append(unpack(groups, of_group, dtype).flatten(-2))
        first += count * size
    return torch.cat(numbers, dim=-1) if numbers else rows.new_empty(*rows.shape[:-1], 0, dtype=dtype)


def key_columns(layout: LayerLayout) -> list[Columns]:
    """Of each group of a layer that keeps rows of codes."""
    return [group.qk_columns for group in layout.groups if group.qk_columns is not None]


def value_columns(layout: LayerLayout) -> list[Columns]:
    """As `key_columns`; none where a value is read from the key row."""
    return [group.v_columns for group in layout.groups if group.v_columns is not None and not group.joint]


@dataclass(frozen=True)
class LayerColumns:
    """The columns by bits of each group of a layer, of its keys and of its values."""

    key: tuple[Columns, ...]
    value: tuple[Columns, ...]

    @staticmethod
    def of(layout: LayerLayout) -> LayerColumns:
        """Those of a layer that keeps rows of codes; no value columns where values are read from the key rows."""
        return _columns_of(layout)

    @cached_property
    def _hash(self) -> int:
        return hash((self.key, self.value))

    def __hash__(self) -> int:
        """Computed once: every launch looks the layer up in caches."""
        return self._hash


@lru_cache(maxsize=4096)
def _columns_of(layout: LayerLayout) -> LayerColumns:
    return LayerColumns(tuple(key_columns(layout)), tuple(value_columns(layout)))


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """[..., n] -> [..., n bits / 8]."""
    middle = 1 << (bits - 1)
    codes = (numbers.floor().clamp(-middle, middle - 1) + middle).to(torch.uint8)
    # [words, places in a half, halves] -> [words, halves, bytes of a half, places in a byte]
    places = codes.unflatten(-1, (-1, 16 // bits, 2)).transpose(-1, -2).unflatten(-1, (2, 8 // bits))
    return (places << _shifts(bits, codes.device)).sum(-1, dtype=torch.uint8).flatten(-3)


def _unpacked(rows: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """[..., n bits / 8] -> [..., n]."""
    words = rows.contiguous().view(torch.int32)
    shifts = [bits * place + 16 * half for place in range(16 // bits) for half in (0, 1)]
    codes = words.unsqueeze(-1) >> torch.tensor(shifts, dtype=torch.int32, device=rows.device)
    return codes.bitwise_and_((1 << bits) - 1).flatten(-2).to(dtype).sub_(1 << (bits - 1))


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Where the columns of a byte begin."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
