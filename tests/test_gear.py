"""GEAR against float64: outliers, low rank, and the bytes of both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cache_truth import affine_truth, states
from support.policy_models import PolicyModels, prompts
from transformers import DynamicCache

from rotor.checkpoint.layout import GroupLayout, LayerLayout
from rotor.checkpoint.rows import NumberRow
from rotor.policies import GEAR, CodedLayer, cache_policy, find_policy
from rotor.policies.methods.gear import GEARCode, low_rank


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


def _rows_of_two_latents() -> LayerLayout:
    """Keys of 24 and 8 numbers, values of 16 and 12."""
    groups = [GroupLayout((0,), NumberRow(24), NumberRow(16)), GroupLayout((1,), NumberRow(8), NumberRow(12))]
    return LayerLayout(tuple(groups))


@pytest.mark.parametrize("keys", [True, False])
def test_each_latent_of_a_compressed_layer_has_a_rank_of_its_own(keys: bool) -> None:
    """Equation 6: what is lost of a row has rank 4 in each latent; outliers and backbone are those of the whole row."""
    width, split = (32, 24) if keys else (28, 16)
    x = states(1, 1, 60, width)
    layer = CodedLayer(GEAR(bits=2, sparsity=0.1, rank=4, loops=8).streams())
    layer.follow(_rows_of_two_latents(), torch.float32)
    codec = layer.streams[0 if keys else 1].prompt_codec
    assert isinstance(codec, GEARCode)
    backbone = replace(codec, rank=0)
    parts = codec.encode(x)
    rest, best = (own.decode(own.encode(x), 1, width) for own in (backbone, codec))
    made_up, lost = (best - rest).double(), (x - rest).double()
    outliers = lost.abs() < 1e-2  # float16 of themselves
    lost = lost.masked_fill(outliers, 0.0)
    for part in (slice(0, split), slice(split, None)):
        # As near to what is lost of a latent as its best matrix of rank 4.
        short = torch.linalg.svdvals(lost[0, 0, :, part])[4:].norm()
        left = (lost - made_up).masked_fill(outliers, 0.0)[0, 0, :, part].norm()
        assert left < 1.05 * short
    assert parts[3].shape == (1, 2, 60, 4)
    assert parts[4].shape == (1, 1, 1, width, 4)


def test_a_compressed_checkpoint_generates_with_a_rank_for_each_latent(policy_models: PolicyModels) -> None:
    model, tokens = policy_models.model("post"), prompts(2, 50)
    with cache_policy(model, GEAR(bits=8, buffer=4)), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=tokens[:, :40], past_key_values=cache, use_cache=True)
        found = model(input_ids=tokens[:, 40:44], past_key_values=cache, use_cache=True).logits
    with torch.no_grad():
        exact = model(input_ids=tokens[:, :44]).logits[:, 40:]
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()
    layout = model.model.layers[0].self_attn.layout
    side = cache.layers[0].sequences[0].sides[0]
    assert [parts[3].shape[1:] for parts in side.segments] == [(len(layout.groups), 40, 4), (len(layout.groups), 4, 2)]


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
