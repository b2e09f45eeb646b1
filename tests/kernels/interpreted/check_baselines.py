"""Flash-decoding that compressed attention is measured beside, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from rotor.tools.bench import flash
from rotor.tools.bench.baselines import random_baseline


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_flash_decoding(bits, monkeypatch) -> None:
    monkeypatch.setattr(flash, "PROGRAMS_PER_SM", 3)
    generator = torch.Generator().manual_seed(0)
    problem = random_baseline((4, 2, 32), [70, 1, 129], bits, torch.float16, generator)
    got, exact = flash.flash_decoding(problem)(), problem.unrounded()
    assert (got.double() - exact).norm() / exact.norm() < 2**-9
    numbers = 2 * 2 * 200 * 32
    assert problem.cache_bytes == {16: numbers * 2, 8: numbers + 8, 4: numbers // 2 + numbers // 16 * 4}[bits]
