"""Rows that are packed for a file: they come back bit for bit, and take what their distribution says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rotor.checkpoint.layout import ExactTokens, GroupLayout, LayerLayout
from rotor.checkpoint.row_channels import Widths, packed, spots_of, unpacked
from rotor.checkpoint.row_codec import CODES, PREDICTED, RAW, RowCodec, Zstandard, pack_numbers, unpack_numbers
from rotor.checkpoint.row_prediction import LayerCodes, fitted
from rotor.checkpoint.rows import CodedRow
from rotor.errors import CheckpointError
from rotor.kernels.parameters import pack_layer

pytest.importorskip("zstandard", reason="zstandard is not installed (the extra store)")

BITS = (16, 16, 12, 12, 12, 8, 8, 8, 8, 6, 6, 6, 4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2)
JOINT = LayerLayout(
    (
        GroupLayout((0, 1), CodedRow.of_bits(BITS, scaled=True)),
        GroupLayout((2, 3), CodedRow.of_bits((8, 6, 4, 2), scaled=True)),
    ),
    64,
    ExactTokens(4, 128),
)
APART = LayerLayout(
    (
        GroupLayout((0,), CodedRow.of_bits(BITS[5:]), CodedRow.of_bits((4,) * 20)),
        GroupLayout((1,), CodedRow.of_bits((12, 4)), CodedRow.of_bits((6, 6, 2))),
    ),
    16,
)
ODD = LayerLayout((GroupLayout((0, 1), CodedRow.of_bits((2,) * 7)),), 64)
LAYOUTS = {"joint": JOINT, "apart": APART, "crumbs alone": ODD}


def random_rows(layout: LayerLayout, tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows of latents in steps, which are normal: [tokens, bytes]."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([2.0 ** (bits - 2) for group in layout.groups for bits in group.key.bits])
    keys = torch.randn(tokens, layout.key_rank, generator=generator) * spread
    sides = [pack_scaled(keys, layout)]
    if not layout.joint:
        sides.append(pack_layer(torch.randn(tokens, layout.value_rank, generator=generator) * 3, layout, False))
    return torch.cat(sides, -1).numpy()


def pack_scaled(latents: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    if not layout.scaled:
        return pack_layer(latents, layout, True)
    from rotor.checkpoint.rows import RowScale

    scale = RowScale(torch.zeros(layout.key_rank), torch.full((layout.key_rank,), 1e-4))
    return pack_layer(latents, layout, True, scale)


@pytest.mark.parametrize("tokens", [1, 3, 64, 257])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_level_gives_back_every_bit(name: str, tokens: int) -> None:
    """Also of bytes that no row of rotor's has, and where layers have other layouts."""
    layers = [(LAYOUTS[name], random_rows(LAYOUTS[name], tokens, seed)) for seed in range(2)]
    layers.append((APART, random_rows(APART, tokens)))
    layers.append((JOINT, np.random.default_rng(1).integers(0, 256, layers[-1][1].shape, np.uint8)))
    layers[-1] = (APART, layers[-1][1])
    for level in ("none", "fast", "small"):
        packer, unpacker = RowCodec(level), RowCodec()  # type: ignore[arg-type]
        for layout, rows in layers:
            data = packer.pack(rows, spots_of(layout))
            assert level != "none" or data == bytes([RAW]) + rows.tobytes()
            back = unpacker.unpack(memoryview(data), spots_of(layout), *rows.shape)
            assert np.array_equal(back, rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_channels_are_those_that_rows_were_packed_of(name: str) -> None:
    layout, tokens = LAYOUTS[name], 8
    rows, spots = random_rows(layout, tokens), spots_of(layout)
    channels, widths = unpacked(rows, spots), Widths(spots)
    assert np.array_equal(packed(channels, spots, rows.shape[1]), rows)
    place = low = 0
    for first, row in spots:
        codes, nibble = row.unpack_codes(torch.from_numpy(rows[:, first : first + row.row_bytes()]))
        if nibble is not None:
            assert np.array_equal(channels.codes[place], nibble[:, 0])
            place += 1
        for channel, bits in enumerate(row.bits):
            code, more = channels.codes[place].astype(int), max(bits - 8, 0)
            if more:
                code = code << more | channels.low[low]
                low += 1
            assert np.array_equal(code, codes[:, channel]), (channel, bits)
            assert widths.bits[place] == min(bits, 8)
            place += 1
    assert place == len(channels.codes)
    assert low == len(channels.low)


def related_layers(tokens: int, noise: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of two layers of 16 channels of 8 bits and 16 of 4; the latents of the second follow from the first's."""
    random = np.random.default_rng(0)
    first = random.normal(size=(32, tokens))
    turn = np.linalg.qr(random.normal(size=(32, 32)))[0]
    second = np.sqrt(1 - noise**2) * turn @ first + noise * random.normal(size=(32, tokens))
    sides = []
    for latents in (first, second):
        steps = np.concatenate([latents[:16] * 40, latents[16:] * 3]).T.astype(np.float32)
        sides.append(PLAIN.pack(torch.from_numpy(steps)).numpy())
    return sides[0], sides[1]


PLAIN = CodedRow.of_bits((8,) * 16 + (4,) * 16)
SPOTS = spots_of(LayerLayout((GroupLayout((0,), PLAIN, PLAIN),), 64))[:1]


def test_what_follows_from_the_layer_before_takes_fewer_bytes() -> None:
    """About log2(1 / noise) bits a code, less the weights; where nothing follows, next to none are stored."""
    tokens = 4096
    first, second = related_layers(tokens, 0.25)
    sizes = {}
    for level in ("fast", "small"):
        codec = RowCodec(level)  # type: ignore[arg-type]
        codec.pack(first, SPOTS)
        data = codec.pack(second, SPOTS)
        assert data[0] == (PREDICTED if level == "small" else CODES)
        sizes[level] = len(data) * 8 / tokens / 32
        decoder = RowCodec()
        decoder.unpack(memoryview(codec_data(first, level)), SPOTS, *first.shape)
        assert np.array_equal(decoder.unpack(memoryview(data), SPOTS, *second.shape), second)
    assert 1.5 < sizes["fast"] - sizes["small"] < 2
    codec, unrelated = RowCodec("small"), related_layers(tokens, 1.0)[1]
    codec.pack(first, SPOTS)
    assert len(codec.pack(unrelated, SPOTS)) < 1.003 * len(codec_data(unrelated, "fast"))


def codec_data(rows: np.ndarray[Any, Any], level: Any) -> bytes:
    return RowCodec(level).pack(rows, SPOTS)


def test_codes_take_little_more_than_their_entropy() -> None:
    tokens = 8192
    rows = related_layers(tokens, 1.0)[0]
    channels = unpacked(rows, SPOTS)
    counts = [np.bincount(line, minlength=256) / tokens for line in channels.codes]
    entropy = sum(-(share[share > 0] * np.log2(share[share > 0])).sum() for share in counts) * tokens / 8
    assert entropy < len(codec_data(rows, "fast")) < 1.02 * entropy < 0.95 * rows.nbytes


def test_a_prediction_is_least_squares_in_whole_numbers() -> None:
    """It is computed the same way whoever does it: against int64 and one rounding a step, in plain numpy."""
    first, second = related_layers(2048, 0.3)
    widths = Widths(SPOTS)
    before, own = (LayerCodes(unpacked(rows, SPOTS).codes, widths.bits) for rows in (first, second))
    prediction = fitted(before, own)
    assert prediction is not None
    assert prediction.used.all()
    centred = before.codes.astype(np.int64)
    centred = np.where(widths.bits[:, None] == 8, centred - 128, (2 * centred - 15) * 8)
    assert np.array_equal(before.centred, centred)
    sums = (prediction.weights.astype(np.int64) @ centred).astype(np.float32)
    codes = np.clip(sums * prediction.step[:, None] + prediction.bias[:, None], 0, 2.0 ** widths.bits[:, None] - 1)
    middle = (1 << widths.bits - 1)[:, None]
    expected = (codes.astype(np.int64) - middle) % 256
    assert np.array_equal(prediction.codes(before.centred, widths.bits), expected)
    error = own.codes.astype(float) - codes.astype(np.int64)
    spread = own.codes.astype(float).var(1)
    assert (error.var(1) < (0.3**2 + 0.02) * spread + 1 / 6).all()


def test_numbers_come_back_byte_by_byte() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = numbers.view(torch.uint8).view(-1, 2).numpy()
    data = pack_numbers(plain, Zstandard())
    assert len(data) < 0.8 * plain.nbytes
    assert np.array_equal(unpack_numbers(memoryview(data), Zstandard(), plain.shape), plain)
    with pytest.raises(CheckpointError, match="packed rows of 1000 bytes, expected 999"):
        unpack_numbers(memoryview(data), Zstandard(), (999, 2))


def test_damaged_data_is_refused() -> None:
    """Whatever is cut off or changed gives an error of one kind, or other rows; never anything else."""
    first, second = related_layers(512, 0.1)
    codec = RowCodec("small")
    before, data = codec.pack(first, SPOTS), codec.pack(second, SPOTS)
    assert data[0] == PREDICTED
    alone = RowCodec()
    with pytest.raises(CheckpointError, match="follow from a layer before, which is not there"):
        alone.unpack(memoryview(data), SPOTS, *second.shape)
    random, refused = np.random.default_rng(0), 0
    for number in range(300):
        changed = bytearray(data)
        if number % 3:
            changed[random.integers(0, len(changed))] ^= 1 << random.integers(0, 8)
        else:
            del changed[random.integers(0, len(changed)) :]
        decoder = RowCodec()
        decoder.unpack(memoryview(before), SPOTS, *first.shape)
        try:
            rows = decoder.unpack(memoryview(changed), SPOTS, *second.shape)
        except CheckpointError:
            refused += 1
        else:
            assert rows.shape == second.shape
    assert refused > 100
