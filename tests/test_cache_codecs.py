"""Codecs of cached rows against loops in float64: packing, affine codes, fp8, Hadamard, levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_truth import affine_truth, states

from rotor.policies import (
    NUQ,
    CodedLayer,
    PerToken,
)
from rotor.policies.affine import AffineCode
from rotor.policies.fp8 import FP8Code
from rotor.policies.packing import pack, packed_bytes, unpack
from rotor.policies.per_token import hadamard


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("width", [1, 5, 8, 63])
def test_packing_is_without_gaps_and_reversible(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (3, width), generator=torch.Generator().manual_seed(width)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, packed_bytes(width, bits)) == (3, -(-width * bits // 8))
    assert torch.equal(unpack(packed, bits, width), codes)
    stream = sum(int(code) << (bits * i) for i, code in enumerate(codes[0]))  # one long number, lowest bits first
    assert bytes(packed[0].tolist()) == stream.to_bytes(packed_bytes(width, bits), "little")


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("tokens, columns", [(1, 8), (1, 16), (6, 1), (12, 1), (1, 5)])
def test_affine_code_is_that_of_float64(bits: int, tokens: int, columns: int) -> None:
    x = states(2, 3, 12, 13)
    code = AffineCode(bits, tokens, columns)
    got = code.decode(code.encode(x), 3, 13).double().numpy()
    for row in range(2):
        for head in range(3):
            expected = affine_truth(x[row, head].double().numpy(), bits, tokens, min(columns, 13))
            np.testing.assert_allclose(got[row, head], expected, rtol=1e-5, atol=1e-5)


def test_groups_over_all_heads_are_those_of_the_row() -> None:
    x = states(2, 3, 4, 8)
    code = AffineCode(4, heads_together=True)
    got = code.decode(code.encode(x), 3, 8)
    row = x.transpose(1, 2).flatten(2)[0].double().numpy()
    expected = affine_truth(row, 4, 1, 24).reshape(4, 3, 8).transpose(1, 0, 2)
    np.testing.assert_allclose(got[0].double().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_equal_numbers_and_huge_ones_are_coded() -> None:
    code = AffineCode(2, 1, 4)
    constant = torch.full((1, 1, 2, 8), 0.5)
    assert torch.equal(code.decode(code.encode(constant), 1, 8), constant)
    assert torch.isfinite(code.decode(code.encode(torch.tensor([[[[1e9, -1e9, 0, 1]]]])), 1, 4)).all()


@pytest.mark.parametrize("fixed", [False, True])
def test_fp8_is_the_nearest_of_float64(fixed: bool) -> None:
    x = states(2, 2, 5, 8)
    code = FP8Code(fixed)
    parts = code.encode(x)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[torch.isfinite(every)]
    scale = parts[1].double().expand(2, 2, 5, 1)
    nearest = (x.double().unsqueeze(-1) / scale.unsqueeze(-1) - every).abs().min(-1).values
    got = code.decode(parts, 2, 8).double()
    assert torch.allclose((x.double() - got).abs() / scale, nearest, rtol=1e-5, atol=1e-7)
    assert float((x.abs() / scale).max()) <= 448


def test_hadamard_is_orthonormal_and_leaves_no_trace() -> None:
    matrix = hadamard(16).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(16).double(), atol=1e-6)
    layer = CodedLayer(PerToken(bits=8, group=16, hadamard=True).streams())
    x = states(1, 2, 6, 48)
    layer.update(x, x)
    key, _ = layer.update(x[:, :, :1], x[:, :, :1])
    assert float((key[:, :, :6] - x).abs().max()) < 0.05


def levels_truth(numbers: np.ndarray, count: int, loops: int) -> np.ndarray:
    """Of one vector, in float64, by loops."""
    ordered = np.sort(numbers)
    levels = ordered[[int((i + 0.5) / count * len(ordered)) for i in range(count)]]
    for _ in range(loops):
        nearest = np.abs(ordered[:, None] - levels).argmin(1)
        levels = np.array([ordered[nearest == i].mean() if (nearest == i).any() else levels[i] for i in range(count)])
    return levels


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_levels_are_those_of_float64(bits: int) -> None:
    x = states(2, 3, 40, 6)
    key, value = (stream.codec for stream in NUQ(bits, loops=2).streams())
    keys, values = (codec.decode(codec.encode(x), 3, 6).double().numpy() for codec in (key, value))
    for row in range(2):
        for head in range(3):
            own = x[row, head].double().numpy()
            for channel in range(6):
                levels = levels_truth(own[:, channel], 2**bits, 2)
                expected = levels[np.abs(own[:, channel, None] - levels).argmin(1)]
                np.testing.assert_allclose(keys[row, head, :, channel], expected, rtol=2e-3, atol=2e-3)
            scale = np.abs(own).max(1, keepdims=True).astype(np.float16).astype(np.float64)
            levels = levels_truth((own / scale).reshape(-1), 2**bits, 2)
            expected = levels[np.abs((own / scale)[..., None] - levels).argmin(-1)] * scale
            error = np.abs(values[row, head] - expected)
            assert np.quantile(error, 0.98) < 5e-3  # a number in the middle of two levels may fall on either side


def test_bytes_of_levels_are_counted_once() -> None:
    layer = CodedLayer(NUQ(bits=2).streams())
    x = states(1, 2, 100, 64)
    layer.update(x, x)
    layer.update(x[:, :, :1], x[:, :, :1])
    codes, levels, scales = 2 * 2 * 101 * 16, 2 * 64 * 4 * 2 + 2 * 4 * 2, 2 * 101 * 2
    assert layer.stored_bytes() == codes + levels + scales
