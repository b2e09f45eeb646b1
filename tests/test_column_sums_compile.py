"""What the compiler makes of the kernels of column sums: matrix products, and no spills."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ragged import layer

from rotor.kernels.ahead import compile_variant
from rotor.kernels.scores.kernel import score_variants


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("softened", [False, True])
def test_products_are_of_matrices_and_nothing_spills(capability: int, softened: bool) -> None:
    flags = {"softened": softened, "mask": softened, "softcap": softened}
    variants = score_variants(layer("pre", 2, (80, 48)), 4, 128, torch.bfloat16, **flags)
    names = ["log sums 4 heads of 128", "column sums 4 heads of 128"]
    assert [variant.name for variant in variants] == (names if softened else names[1:])
    for variant in variants:
        resources = compile_variant(variant, capability)
        assert resources.matrix_products > 0
        assert resources.spill_bytes == 0
