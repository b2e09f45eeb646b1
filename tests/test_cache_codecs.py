"""Codecs of cached rows against loops in float64: packing, affine codes, fp8."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cache_truth import affine_truth, states

from rotor.policies.affine import AffineCode, pack, unpack
from rotor.policies.methods.fp8 import FP8Code


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("width", [1, 5, 8, 63])
def test_packing_is_without_gaps_and_reversible(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (3, width), generator=torch.Generator().manual_seed(width)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, -(-width * bits // 8))
    assert torch.equal(unpack(packed, bits, width), codes)
    stream = sum(int(code) << (bits * i) for i, code in enumerate(codes[0]))  # one long number, lowest bits first
    assert bytes(packed[0].tolist()) == stream.to_bytes(-(-width * bits // 8), "little")


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


def test_fp8_is_the_nearest_of_float64() -> None:
    x = states(2, 2, 5, 8)
    code = FP8Code()
    parts = code.encode(x)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[torch.isfinite(every)]
    scale = parts[1].double().expand(2, 2, 5, 1)
    nearest = (x.double().unsqueeze(-1) / scale.unsqueeze(-1) - every).abs().min(-1).values
    got = code.decode(parts, 2, 8).double()
    assert torch.allclose((x.double() - got).abs() / scale, nearest, rtol=1e-5, atol=1e-7)
    assert float((x.abs() / scale).max()) <= 448
