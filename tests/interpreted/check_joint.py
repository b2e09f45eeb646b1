"""Joint latents of keys and values in Triton's interpreter: both are read from the rows of the keys."""

from __future__ import annotations

import pytest
from coded import MIXTURES, coded_layer, random_coded_case
from kernel_checks import check_decode, check_prefill

from rotor.format.columns import Columns
from rotor.kernels.truth import Sequence

HEAD_DIM = 32


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(("domain", "size", "heads_per_kv"), [("none", 2, 3), ("pre", 1, 3), ("pre", 4, 1)])
def test_decode(domain, size, heads_per_kv, page_size) -> None:
    """Every width, two groups of different columns, odd lengths and none, pages permuted and poisoned."""
    layout = coded_layer(domain, size, (MIXTURES[0], None), (Columns(n8=8, n4=24), None))
    case = random_coded_case(layout, heads_per_kv, HEAD_DIM, 3, 1, 100)
    sequences = [Sequence(1, 0, 100), Sequence(1, 0, 37), Sequence(0, 0, 0)]
    check_decode(case, sequences, page_size=page_size, programs=3)


@pytest.mark.parametrize(
    ("domain", "rebuilt", "page_size"),
    [("none", None, 0), ("none", None, 16), ("pre", True, 0), ("pre", False, 0), ("pre", False, 16), ("pre", True, 16)],
)
def test_prefill(domain, rebuilt, page_size) -> None:
    layout = coded_layer(domain, 2, (MIXTURES[7], None), (MIXTURES[3], None))
    case = random_coded_case(layout, 2, HEAD_DIM, 2, 7, 70)
    check_prefill(case, [Sequence(7, 0, 70), Sequence(2, 0, 37)], rebuilt=rebuilt, page_size=page_size)
