"""Rows as a file holds them: packed more tightly without loss, and unpacked before anything reads them.

The codes of a channel are not equally likely, and those of a layer follow in part from those of the layer before.
General compressors find neither in rows, where nibbles of many channels lie side by side. There are three levels:

none: rows as they are.
fast: codes by channel, the tokens of each side by side, and zstandard's Huffman code over them.
small: before that, each channel is predicted from the channels of the layer before, and its difference from the
    prediction, modulo its levels, is coded. Weights are fitted to the tokens that are stored and lie beside them, in
    steps as coarse as the error with which so many tokens determine them. A channel whose prediction does not earn its
    weights has none.

Predictions are sums of whole numbers, with one rounding each behind them, so that every machine makes the same ones.
Numbers (rows of numbers, exact tokens) are cut into planes of bytes: their signs and exponents are alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import linalg

from ..errors import CheckpointError, UsageError
from ..installing import pip_install
from .rows import NIBBLE_BITS, SIGNED, WIDTHS, WORD_PLANES, CodedRow, Level

if TYPE_CHECKING:
    from .layout import LayerLayout

Bytes = npt.NDArray[Any]
"""Bytes, uint8, of whatever shape."""

BYTE_BITS = 8

DAMAGED = "The file is damaged or forged: save the cache again."

ZSTANDARD_LEVEL = 1
"""Higher levels look longer for repetitions, of which there are next to none."""

STEPS_PER_ERROR = 4.0
"""Step of a stored weight over the error with which the tokens determine it. 2 takes as many bytes, 8 takes 1 % more
(SmolLM2 and Qwen2.5 0.5B, 8,192 tokens)."""

RIDGE = 1e-3
"""Part of its variance that is added to a channel's before weights are fitted."""

OVERHEAD_BITS = 64
"""Bits of a predicted channel's step and bias."""

FEWEST_TOKENS = 64
"""Tokens from which on weights are fitted at all."""

COMPARED_TOKENS = 512
"""Tokens by which it is decided whether a prediction earns its weights."""

RAW, CODES, PREDICTED = range(3)
"""First byte of a layer's data: rows as they are, codes, or codes of which some are predicted."""


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
    """What rows hold of a layer, each channel's tokens side by side. The scale of a row is a channel of 4 bits.

    codes: [channels, tokens], the highest 8 bits of each code at most. low: the other bits of wider ones.
    """

    codes: Bytes
    low: Bytes


class Widths:
    """Bits of the channels of a layer's latents, and which have how many.

    bits: [channels] in `Channels.codes`. wide: for each line of `Channels.low`, the bits in it.
    """

    def __init__(self, spots: Sequence[Spot]) -> None:
        every = [bits for _, row in spots for bits in ((NIBBLE_BITS,) * row.scaled + row.bits)]
        self.bits = np.minimum(every, BYTE_BITS)
        self.classes = {bits: np.flatnonzero(self.bits == bits) for bits in (8, 6, 4, 2)}
        self.low = sum(bits > BYTE_BITS for bits in every)

    def sizes(self, tokens: int) -> list[int]:
        """Bytes of the codes of each class, and of what is low, before they are compressed."""
        return [
            len(own) * tokens * bits // 8 if bits != 6 else len(own) * tokens for bits, own in self.classes.items()
        ] + [self.low * tokens]


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
        planes = slots.reshape(WORD_PLANES, row.words, tokens)
        words = lines[first : first + row.row_bytes()].reshape(row.words, 2, tokens)
        words[:, 0] = planes[0] | planes[1] << 4
        words[:, 1] = planes[2] | planes[3] << 4
    return _transposed(lines)


def _crumbs(slots: Bytes, row: CodedRow) -> Bytes:
    """The crumbs of a row in the order of their channels, from the slots that are cut, which are the last."""
    cut = -(-(row.n6 + row.n2) // 2)
    nibbles = slots[len(slots) - cut :]
    return np.stack([nibbles >> 2, nibbles & 3], axis=1).reshape(2 * cut, slots.shape[1])


def _slots_of(codes: Bytes, low: Bytes, row: CodedRow) -> tuple[Bytes, int]:
    """The slots of a row, and how many lines of `low` they took."""
    slots = np.full((WORD_PLANES * row.words, codes.shape[1]), SIGNED, np.uint8)
    slots[: row.scaled] = codes[: row.scaled]
    place = start = int(row.scaled)
    used, crumbs = 0, []
    for bits, count in zip(WIDTHS, row.counts, strict=True):
        own = codes[place : place + count]
        digits: list[Bytes] = [own] if bits == 4 else [own >> 2] if bits == 6 else []
        if bits >= BYTE_BITS:
            digits = [own >> 4, own & 15]
        if bits > BYTE_BITS:
            rest = low[used : used + count]
            digits += [rest] if bits == 12 else [rest >> 4, rest & 15]
            used += count
        if bits in (2, 6):
            crumbs.append(own & 3)
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

    found: Bytes = torch.from_numpy(lines).t().contiguous().numpy()
    return found


class LayerCodes:
    """The codes of a layer, [channels, tokens], of so many bits each; and what predicts those of the next layer."""

    def __init__(self, codes: Bytes, bits: npt.NDArray[np.int64]) -> None:
        self.codes, self.bits = codes, bits

    @cached_property
    def centred(self) -> npt.NDArray[np.int8]:
        """Codes from the middle of their levels, all over the same range: u becomes (2 u + 1) 2^(7 - bits) - 128."""
        shift = (BYTE_BITS - self.bits)[:, None]
        middle = np.where(shift, 1 << np.maximum(shift - 1, 0), 0)
        return (((self.codes << shift.astype(np.uint8)) + middle.astype(np.uint8)) ^ 128).view(np.int8)

    @cached_property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of `centred`, [channels]."""
        tokens = self.codes.shape[1]
        return _product(self.centred, np.ones((tokens, 1), np.int8))[:, 0] / tokens

    @cached_property
    def covariance(self) -> npt.NDArray[np.float64]:
        """Covariance of `centred`, [channels, channels]."""
        return self.covariance_with(self)

    def covariance_with(self, other: LayerCodes) -> npt.NDArray[np.float64]:
        found = _product(self.centred, other.centred.T) / self.codes.shape[1]
        found -= np.outer(self.mean, other.mean)
        return found


class Prediction(NamedTuple):
    """Prediction of some channels of a layer from those of the layer before.

    used: [channels] bool, which ones. weights: [used, channels before], int8. step, bias: [used], float32.
    """

    used: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.int8]
    step: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    def codes(self, before: npt.NDArray[np.int8], bits: npt.NDArray[np.int64]) -> Bytes:
        """The predicted codes less the middle of their levels, modulo 256, [used, tokens]: differences lie around that
        middle, as the codes of other channels do, with which they share a Huffman code.

        Args:
            before: `LayerCodes.centred` of the layer before. bits: of all channels of this one.
        """
        sums = _product(self.weights, before).astype(np.float32)
        sums *= self.step[:, None]
        sums += self.bias[:, None]
        bits = bits[self.used]
        np.clip(sums, 0, _highest(bits).astype(np.float32), out=sums)
        return sums.astype(np.uint8) - (1 << bits - 1).astype(np.uint8)[:, None]

    def stored(self) -> list[Bytes]:
        """Weights and scales as bytes."""
        return [self.weights.view(np.uint8), np.stack([self.step, self.bias]).astype("<f4").view(np.uint8)]

    @classmethod
    def read(cls, used: npt.NDArray[np.bool_], weights: Bytes, scales: Bytes) -> Prediction:
        """Read what `stored` gave; raises CheckpointError if a scale is no number."""
        step, bias = np.frombuffer(scales, "<f4").astype(np.float32).reshape(2, -1)
        if not (np.isfinite(step).all() and np.isfinite(bias).all()):
            raise CheckpointError("packed rows whose prediction is not finite.", DAMAGED)
        return cls(used, weights.view(np.int8).reshape(len(step), -1).copy(), step, bias)


def _product(a: npt.NDArray[np.int8], b: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
    """a b, exactly; [m, k] and [k, n]."""
    import torch

    left, right = torch.from_numpy(a), torch.from_numpy(b)
    found: npt.NDArray[np.int32] = torch._int_mm(left, right).numpy()
    return found


def fitted(before: LayerCodes, own: LayerCodes) -> Prediction | None:
    """Fit a prediction of a layer's tokens by least squares; None where no channel earns its weights."""
    tokens, bits = own.codes.shape[1], own.bits
    spread, cross = before.covariance.diagonal(), before.covariance_with(own)
    ridge = np.diag(RIDGE * spread + 1e-6)
    weights = linalg.solve(before.covariance + ridge, cross, assume_a="pos", check_finite=False)
    error = own.covariance.diagonal() - (weights * (cross + ridge @ weights)).sum(0)
    step = STEPS_PER_ERROR * np.sqrt(np.maximum(error, 1e-6) / tokens / np.maximum(spread.mean(), 1e-6))
    step = np.maximum(step, np.abs(weights).max(0) / 127)
    whole = np.ascontiguousarray(np.rint(weights / step).astype(np.int8).T)
    levels = 0.5 ** (BYTE_BITS - bits)  # in a unit of `centred`
    middle = np.where(bits < BYTE_BITS, 2.0 ** (bits - 1), 128.5)
    bias = (own.mean - (whole @ before.mean) * step) * levels + middle
    every = Prediction(np.ones(len(bits), bool), whole, (step * levels).astype(np.float32), bias.astype(np.float32))

    some = slice(None, None, -(-tokens // COMPARED_TOKENS))
    codes = own.codes[:, some]
    differences = _differences(codes, every.codes(np.ascontiguousarray(before.centred[:, some]), bits), bits)
    saved_bits = tokens * (_entropies(codes) - _entropies(differences))
    weight_bits = 0.5 * np.log2(2 * np.pi * np.e * (whole.var(1) + 1 / 12))
    used = saved_bits > whole.shape[1] * weight_bits + OVERHEAD_BITS
    return Prediction(used, whole[used], every.step[used], every.bias[used]) if used.any() else None


def _entropies(codes: Bytes) -> npt.NDArray[np.float64]:
    """Bits of a code of each channel, as its frequencies have it."""
    channels, tokens = codes.shape
    places = codes + (np.arange(channels) << BYTE_BITS)[:, None]
    counts = np.bincount(places.ravel(), minlength=channels << BYTE_BITS).reshape(channels, -1)
    return np.log2(tokens) - (counts * np.log2(np.maximum(counts, 1))).sum(1) / tokens  # type: ignore[no-any-return]


def _differences(codes: Bytes, predicted: Bytes, bits: npt.NDArray[np.int64]) -> Bytes:
    """Codes less what is predicted, modulo their levels."""
    return codes - predicted & _highest(bits)


def _highest(bits: npt.NDArray[np.int64]) -> Bytes:
    """The highest code of each channel, [channels, 1]."""
    highest: Bytes = ((1 << bits) - 1).astype(np.uint8)[:, None]
    return highest


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
        found, start = [], head
        for size, length in zip(sizes, lengths, strict=True):
            found.append(self._unpacked(data[start : start + length], size))
            start += length
        return found

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


def _side_by_side(codes: Bytes, bits: int) -> Bytes:
    """Neighbouring tokens' codes in one byte, the first lowest; [channels, tokens] of codes of 4 or 2 bits."""
    import torch  # numpy is several times slower at it

    if bits > NIBBLE_BITS or not codes.size:
        return codes
    words = torch.from_numpy(codes).view(torch.int16 if bits == NIBBLE_BITS else torch.int32)
    together = words.clone()
    for number in range(1, BYTE_BITS // bits):
        together |= words >> (BYTE_BITS - bits) * number
    found: Bytes = together.to(torch.uint8).numpy()
    return found


def _apart(data: Bytes, bits: int, tokens: int) -> Bytes:
    """The codes again, [channels, tokens]."""
    import torch

    if bits > NIBBLE_BITS or not data.size:
        return data.reshape(-1, tokens)
    dtype, mask = (torch.int16, 0x0F0F) if bits == NIBBLE_BITS else (torch.int32, 0x03030303)
    together = torch.from_numpy(data.copy()).to(dtype)
    words = together.clone()
    for number in range(1, BYTE_BITS // bits):
        words |= together << (BYTE_BITS - bits) * number
    found: Bytes = words.bitwise_and_(mask).numpy().view(np.uint8)
    return found.reshape(-1, tokens)


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
            self._before = own = LayerCodes(codes, widths.bits)
            if before is not None and before.codes.shape[1] == codes.shape[1] and tokens >= FEWEST_TOKENS:
                prediction = fitted(before, own)
            if before is not None and prediction is not None:
                used, codes = prediction.used, codes.copy()
                predicted = prediction.codes(before.centred, own.bits)
                codes[used] = _differences(codes[used], predicted, own.bits[used])
        parts = [_side_by_side(codes[own], width) for width, own in widths.classes.items()]
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
        for (size, own), part in zip(widths.classes.items(), parts[-5:-1], strict=True):
            codes[own] = _apart(part, size, whole)
        if used is not None and before is not None and used.any():
            prediction = Prediction.read(used, *parts[:2])
            predicted = prediction.codes(before.centred, bits)
            codes[used] = codes[used] + predicted & _highest(bits[used])
        self._before = LayerCodes(codes, bits)
        return packed(Channels(codes, parts[-1].reshape(-1, whole)), spots, width)[:tokens]


def _whole(tokens: int) -> int:
    """Tokens, filled up so that codes of 2 bits fill bytes."""
    return tokens + -tokens % 4


def pack_numbers(numbers: Bytes, zstandard: Zstandard) -> bytes:
    """Pack numbers, whose bytes are [numbers, bytes of one], plane by plane."""
    return zstandard.pack(list(numbers.T))


def unpack_numbers(data: memoryview, zstandard: Zstandard, shape: tuple[int, int]) -> Bytes:
    """Unpack what `pack_numbers` packed; raises CheckpointError if it is not of this shape."""
    count, size = shape
    return np.stack(zstandard.unpack(data, [count] * size), axis=1)
