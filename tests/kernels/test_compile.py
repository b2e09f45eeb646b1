"""Kernels compiled for GPUs that need not be there: nothing spilled at the sizes of an 8B."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from rotor.bench.precompile import NAMED_SHAPE, PAGE, named_layouts
from rotor.bench.sass import usage
from rotor.bench.variants import layer_variants
from rotor.kernels.defaults import default_layer

MOST_SPILLED_BYTES = 64
"""Of a thread, in kernels whose loop does not hold them."""


def compiles(name: str, arch: int, page: int) -> None:
    layout = named_layouts()[name]
    for variant in layer_variants(layout, NAMED_SHAPE, default_layer(layout), torch.bfloat16, arch, page=page):
        registers, spilled_bytes = usage(variant.compile().asm["cubin"])
        assert registers <= 255
        assert spilled_bytes <= (0 if variant.keys else MOST_SPILLED_BYTES), variant.name


@pytest.mark.parametrize(("name", "arch", "page"), [("joint-128x2-fast", 90, PAGE), ("numbers-64", 80, 0)])
def test_nothing_is_spilled(name, arch, page) -> None:
    compiles(name, arch, page)


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, PAGE])
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", list(named_layouts()))
def test_nothing_is_spilled_anywhere(name, arch, page) -> None:
    compiles(name, arch, page)
