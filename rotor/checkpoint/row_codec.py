"""Rows as a file holds them: packed more tightly without loss, and unpacked before anything reads them.

The codes of a channel are not equally likely, and those of a layer follow in part from those of the layer before.
General compressors find neither in rows, where nibbles of many channels lie side by side. There are three levels:

none: rows as they are.
fast: codes by channel, the tokens of each side by side, and zstandard's Huffman code over them.
small: the same of the differences, modulo their levels, between codes and their predictions (`row_prediction`).

Of numbers (rows of numbers, exact tokens) first the first bytes of all are packed, then the second: signs and exponents
are alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import CheckpointError, UsageError
from ..versions import pip_install
from .row_channels import DAMAGED, Bytes, Channels, Spot, Widths, apart, packed, side_by_side, unpacked
from .row_prediction import LayerCodes, Prediction, differences, fitted, highest
from .rows import Level

ZSTANDARD_LEVEL = 1
"""Higher levels look longer for repetitions, of which there are next to none."""

FEWEST_TOKENS = 64
"""Tokens from which on codes are predicted at all."""

RAW, CODES, PREDICTED = range(3)
"""First byte of a layer's data: rows as they are, codes, or codes of which some are predicted."""


class Zstandard:
    """Compresses bytes by zstandard.

    Raises:
        UsageError: the package is not installed.
    """

    def __init__(self, level: int = ZSTANDARD_LEVEL) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UsageError(
                "levels fast and small need the Python package zstandard, which is not installed.",
                f"Install it ({pip_install('store')}), or save with level none.",
            ) from error
        self._module: Any = zstandard
        self._compress = zstandard.ZstdCompressor(level=level).compress
        self._decompress = zstandard.ZstdDecompressor().decompress

    def pack(self, parts: Sequence[Bytes]) -> bytes:
        """Compress arrays, one behind the other with their lengths."""
        data = [self._compress(np.ascontiguousarray(part).data) if part.size else b"" for part in parts]
        return b"".join([struct.pack(f"<{len(data)}I", *map(len, data)), *data])

    def unpack(self, data: bytes | memoryview, sizes: Sequence[int]) -> list[Bytes]:
        """Decompress arrays of these sizes, which are flat.

        Raises:
            CheckpointError: the data are not of arrays of these sizes.
        """
        head = 4 * len(sizes)
        if len(data) < head:
            raise CheckpointError(f"{len(data)} bytes of packed rows, expected at least {head}.", DAMAGED)
        lengths = struct.unpack_from(f"<{len(sizes)}I", data)
        if head + sum(lengths) != len(data):
            raise CheckpointError(f"{len(data)} bytes of packed rows, expected {head + sum(lengths)}.", DAMAGED)
        parts, start = [], head
        for size, length in zip(sizes, lengths, strict=True):
            parts.append(self._unpacked(data[start : start + length], size))
            start += length
        return parts

    def _unpacked(self, data: bytes | memoryview, size: int) -> Bytes:
        if not size and not len(data):
            return np.empty(0, np.uint8)
        try:
            stated = self._module.frame_content_size(data)  # decompress() would allocate whatever that is
            content = self._decompress(data) if stated == size else b""
        except self._module.ZstdError as error:
            raise CheckpointError(f"packed rows cannot be unpacked: {error}.", DAMAGED) from error
        if len(content) != size:
            raise CheckpointError(f"packed rows of {stated} bytes, expected {size}.", DAMAGED)
        return np.frombuffer(content, np.uint8)


class RowCodec:
    """Packs or unpacks the rows of some tokens, layer by layer from the first on.

    level: of what is packed; whatever level it had is unpacked.
    """

    def __init__(self, level: Level = "none") -> None:
        self.level = level
        self._before: LayerCodes | None = None

    @cached_property
    def zstandard(self) -> Zstandard:
        return Zstandard()

    def pack(self, rows: Bytes, spots: Sequence[Spot]) -> bytes:
        """Pack the rows of the next layer, [tokens, bytes].

        Raises:
            UsageError: the level needs zstandard, which is missing.
        """
        before, self._before = self._before, None
        if self.level == "none":
            return bytes([RAW]) + rows.tobytes()
        tokens = len(rows)
        filled = np.concatenate([rows, np.zeros((_whole(tokens) - tokens, rows.shape[1]), np.uint8)])
        channels, widths = unpacked(filled, spots), Widths(spots)
        if not np.array_equal(packed(channels, spots, rows.shape[1])[:tokens], rows):
            return bytes([RAW]) + rows.tobytes()  # something else stands where a row has nothing
        codes, prediction = channels.codes, None
        if self.level == "small":
            self._before = layer = LayerCodes(codes, widths.bits)
            if before is not None and before.codes.shape[1] == codes.shape[1] and tokens >= FEWEST_TOKENS:
                prediction = fitted(before, layer)
            if before is not None and prediction is not None:
                used, codes = prediction.used, codes.copy()
                predicted = prediction.codes(before.centred, layer.bits)
                codes[used] = differences(codes[used], predicted, layer.bits[used])
        parts = [side_by_side(codes[chosen], width) for width, chosen in widths.classes.items()]
        parts.append(channels.low)
        if prediction is None:
            return bytes([CODES]) + self.zstandard.pack(parts)
        used_bits = np.packbits(prediction.used).tobytes()
        return bytes([PREDICTED]) + used_bits + self.zstandard.pack([*prediction.stored(), *parts])

    def unpack(self, data: memoryview, spots: Sequence[Spot], tokens: int, width: int) -> Bytes:
        """Unpack the rows of the next layer, [tokens, width].

        Raises:
            CheckpointError: the data are none that `pack` gave of such rows. UsageError: zstandard is missing.
        """
        before, self._before = self._before, None
        kind, data = data[0] if len(data) else -1, data[1:]
        if kind == RAW:
            if len(data) != tokens * width:
                raise CheckpointError(f"{len(data)} bytes of rows, expected {tokens * width}.", DAMAGED)
            return np.frombuffer(data, np.uint8).reshape(tokens, width)
        if kind not in (CODES, PREDICTED):
            raise CheckpointError(f"packed rows of kind {kind}, expected {RAW} to {PREDICTED}.", DAMAGED)
        whole, widths = _whole(tokens), Widths(spots)
        bits, sizes, used = widths.bits, widths.sizes(whole), None
        if kind == PREDICTED:
            if before is None or before.codes.shape[1] != whole:
                raise CheckpointError("packed rows follow from a layer before, which is not there.", DAMAGED)
            head = -(-len(bits) // 8)
            used = np.unpackbits(
                np.frombuffer(bytes(data[:head]).ljust(head, b"\0"), np.uint8), count=len(bits)
            ).astype(bool)
            data, sizes = data[head:], [used.sum() * len(before.bits), 8 * used.sum(), *sizes]
        parts = self.zstandard.unpack(data, sizes)
        codes = np.empty((len(bits), whole), np.uint8)
        for (size, chosen), part in zip(widths.classes.items(), parts[-5:-1], strict=True):
            codes[chosen] = apart(part, size, whole)
        if used is not None and before is not None and used.any():
            prediction = Prediction.read(used, *parts[:2])
            predicted = prediction.codes(before.centred, bits)
            codes[used] = codes[used] + predicted & highest(bits[used])
        self._before = LayerCodes(codes, bits)
        return packed(Channels(codes, parts[-1].reshape(-1, whole)), spots, width)[:tokens]


def _whole(tokens: int) -> int:
    """Tokens, filled up so that codes of 2 bits fill bytes."""
    return tokens + -tokens % 4


def pack_numbers(numbers: Bytes, zstandard: Zstandard) -> bytes:
    """Pack numbers, whose bytes are [numbers, bytes of one], the first bytes of all, then the second."""
    return zstandard.pack(list(numbers.T))


def unpack_numbers(data: memoryview, zstandard: Zstandard, shape: tuple[int, int]) -> Bytes:
    """Unpack what `pack_numbers` packed; raises CheckpointError if it is not of this shape."""
    count, size = shape
    return np.stack(zstandard.unpack(data, [count] * size), axis=1)
