"""KVTC against plain loops: allocation of bits, codes of components, and bytes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from support.cache_truth import states

from rotor.errors import UsageError
from rotor.policies import KVTC, LayerSample
from rotor.policies.methods.kvtc import WIDTHS, allocate


def fitted(policy: KVTC, rows: torch.Tensor) -> KVTC:
    """On rows [n, heads, tokens, width], the keys and the values alike."""
    side = rows.transpose(1, 2).flatten(2)
    return policy.fitted([LayerSample(side, side, side, side)])


@pytest.mark.parametrize("budget", [0, 3, 7, 40])
def test_bits_are_the_best_of_all_that_fit(budget: int) -> None:
    losses = torch.rand(4, len(WIDTHS), generator=torch.Generator().manual_seed(budget), dtype=torch.float64)
    losses = losses.sort(descending=True, dim=1).values
    found = allocate(losses, budget).tolist()
    fitting = [c for c in product(range(len(WIDTHS)), repeat=4) if sum(WIDTHS[i] for i in c) <= budget]
    best = min(fitting, key=lambda c: sum(float(losses[n, i]) for n, i in enumerate(c)))
    assert found == [WIDTHS[i] for i in best]


def test_codes_are_those_of_principal_components_in_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = states(3, 2, 60, 6) @ torch.randn(6, 6, generator=generator)  # heads of correlated numbers
    policy = fitted(KVTC(bits=2.5, first=0, window=0), rows)
    code, numbers = policy.levels[0][0], rows.transpose(1, 2).flatten(2).flatten(0, 1).double().numpy()
    centred = numbers - numbers.mean(0)
    energy, components = np.linalg.eigh(centred.T @ centred)
    basis = code.basis.double().numpy()
    assert int(code.bits.sum()) <= 2.5 * 12
    assert code.bits.tolist() == sorted(code.bits.tolist(), reverse=True)
    # A component's variance is its eigenvalue; those of most energy have most bits.
    np.testing.assert_allclose(np.sort((centred @ basis).var(0)), energy / len(numbers), rtol=1e-4)
    np.testing.assert_allclose(np.abs(components.T @ basis).max(0), 1, atol=1e-4)
    by_energy = np.array(code.bits.tolist())[np.argsort(-(centred @ basis).var(0))]
    assert by_energy.tolist() == code.bits.tolist()
    expected = numbers.mean(0) + np.zeros_like(numbers)
    for c, (bits, step) in enumerate(zip(code.bits.tolist(), code.step.double().tolist(), strict=True)):
        if bits:
            levels = (np.arange(2**bits) + 0.5 - 2 ** (bits - 1)) * step
            latent = centred @ basis[:, c]
            expected += np.outer(levels[np.abs(latent[:, None] - levels).argmin(1)], basis[:, c])
    got = code.decode(code.encode(rows), 2, 6).transpose(1, 2).flatten(2).flatten(0, 1).numpy()
    assert np.quantile(np.abs(got - expected), 0.999) < 1e-3
    errors = [fitted(KVTC(bits=bits, first=0), rows).levels[0][0] for bits in (1.0, 2.0, 4.0)]
    errors = [float((c.decode(c.encode(rows), 2, 6) - rows).square().mean()) for c in errors]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_first_and_newest_tokens_are_exact_and_bytes_those_of_bits() -> None:
    rows = states(1, 2, 60, 8)
    policy = fitted(KVTC(bits=2.0, first=4, window=10), rows)
    (layer,) = policy.layers(1)
    layer.update(rows[:, :, :30], rows[:, :, :30])
    for start in range(30, 60):
        seen = layer.update(rows[:, :, start : start + 1], rows[:, :, start : start + 1])[0]
    assert torch.equal(seen[:, :, :4], rows[:, :, :4])
    assert torch.equal(seen[:, :, 49:], rows[:, :, 49:])
    assert not torch.isclose(seen[:, :, 4:49], rows[:, :, 4:49]).all(-1).any()
    bits = policy.levels[0][0].bits
    coded = sum(-(-int((bits == width).sum()) * width // 8) for width in WIDTHS)
    assert layer.stored_bytes() == 2 * (46 * coded + 14 * 16 * 4)
    with pytest.raises(UsageError, match="fitted to 0 layers, the model has 3"):
        KVTC().layers(3)
    with pytest.raises(UsageError, match="is for uncompressed models"):
        policy.check_rows(False, False)
