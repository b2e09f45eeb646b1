"""GEAR against float64: outliers, low rank, and the bytes of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cache_truth import affine_truth, states

from rotor.policies import GEAR, CodedLayer, find_policy
from rotor.policies.methods.gear import low_rank


def gear_truth(
    numbers: np.ndarray, bits: int, sparsity: float, rank: int, keys: bool, group: int | None = None
) -> np.ndarray:
    """GEAR of one run in float64, [heads, tokens, width]: outliers, KCVT of the rest (with `group` KIVI), low rank of
    what is left."""
    heads, tokens, width = numbers.shape
    rest, outlier = numbers.copy(), np.zeros(numbers.shape, bool)
    together = numbers.transpose(1, 0, 2).reshape(tokens, heads * width)
    vectors = (
        [(head, slice(None), channel) for head in range(heads) for channel in range(width)]
        if keys
        else [(slice(None), token) for token in range(tokens)]
    )
    for place in vectors:
        vector = rest[place].reshape(-1)
        count = int(sparsity / 2 * len(vector))
        order = np.argsort(vector)
        taken = np.r_[order[:count], order[len(vector) - count :]]
        mask = np.zeros(len(vector), bool)
        mask[taken] = True
        filled = np.where(mask, vector[~mask].mean(), vector)
        rest[place], outlier[place] = filled.reshape(rest[place].shape), mask.reshape(rest[place].shape)
    if keys:
        coded = np.stack([affine_truth(head, bits, group or tokens, 1) for head in rest])
    elif group:
        coded = np.stack([affine_truth(head, bits, 1, group) for head in rest])
    else:
        together = rest.transpose(1, 0, 2).reshape(tokens, heads * width)
        coded = affine_truth(together, bits, 1, heads * width).reshape(tokens, heads, width).transpose(1, 0, 2)
    result = np.empty_like(numbers)
    for head in range(heads):
        lost = np.where(outlier[head], 0.0, rest[head] - coded[head])
        right = torch.randn(width, rank, generator=torch.Generator().manual_seed(0)).double().numpy()
        for _ in range(2):  # algorithm 2
            last, right = right, lost.T @ (lost @ right)
        left = np.linalg.qr(lost @ np.linalg.qr(last)[0])[0]
        result[head] = coded[head] + left @ (left.T @ lost)
    return np.where(outlier, numbers, result)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("sparsity, rank", [(0.2, 3), (0.0, 2), (0.2, 0)])
def test_gear_is_that_of_float64(keys: bool, sparsity: float, rank: int) -> None:
    x = states(1, 2, 20, 12)
    policy = GEAR(bits=2, sparsity=sparsity, rank=rank)
    codec = policy.streams()[0 if keys else 1].prompt_codec
    got = codec.decode(codec.encode(x), 2, 12)[0].double().numpy()
    expected = gear_truth(x[0].double().numpy(), 2, sparsity, rank, keys)
    assert np.abs(got - expected).max() < 5e-3  # factors and outliers are float16
    assert np.abs(got - x[0].double().numpy()).max() > 0.05


@pytest.mark.parametrize("name, sparsity", [("gear-2", 0.02), ("gear-l-2", 0.0)])
def test_gear_at_2_bits_is_on_kivi_run_by_run(name: str, sparsity: float) -> None:
    """Section 4: g = n_b = 64 at 2 bits, rank 4 in the prompt, whose rest waits, and 2 in each later run."""
    x = states(1, 2, 300, 64)
    layer = CodedLayer(find_policy(name).streams())
    for start, end in [(0, 150), *((t, t + 1) for t in range(150, 300))]:
        seen = layer.update(x[:, :, start:end], x[:, :, start:end])
    runs = [(0, 128, 4), (128, 192, 2), (192, 256, 2)]
    for keys, got in zip((True, False), seen, strict=True):
        assert torch.equal(got[:, :, 256:], x[:, :, 256:])
        for start, end, rank in runs:
            part = x[0, :, start:end].double().numpy()
            expected = gear_truth(part, 2, sparsity, rank, keys, 64)
            assert np.abs(got[0, :, start:end].double().numpy() - expected).max() < 1e-2


def test_low_rank_comes_close_to_the_best_there_is() -> None:
    matrix = states(3, 20, 9)
    left, right = low_rank(matrix, 2, 8)
    best = torch.linalg.svdvals(matrix.double())[:, 2:].norm(dim=-1)
    assert torch.allclose((matrix - left @ right.mT).norm(dim=(-2, -1)).double(), best, rtol=0.02)
    assert all(torch.isfinite(factor).all() for factor in low_rank(1e4 * matrix, 2, 60))
    assert torch.allclose(left.mT @ left, torch.eye(2).expand(3, 2, 2), atol=1e-5)
    assert low_rank(matrix, 4, 1)[0].shape == (3, 20, 4)
    assert low_rank(matrix[:, :2], 4, 2)[0].shape == (3, 2, 2)  # no more than there are rows


def test_bytes_of_gear_are_its_codes_factors_and_outliers() -> None:
    layer = CodedLayer(GEAR(bits=4, sparsity=0.02, rank=4).streams())
    x = states(1, 2, 100, 64, dtype=torch.bfloat16)
    layer.update(x, x)
    numbers = 2 * 64 * 100
    codes = 2 * numbers // 2 + 4 * 2 * 64 + 4 * 100
    factors = 2 * 2 * 2 * 4 * (100 + 64)  # sides, heads, bytes, rank
    outliers = (2 * 2 * 64 + 2 * 100) * (2 + 2)  # of each channel of keys and of each token of values
    assert layer.stored_bytes() == codes + factors + outliers
