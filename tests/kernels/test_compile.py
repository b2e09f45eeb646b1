"""Kernels compiled for GPUs that need not be there: nothing spilled at the sizes of an 8B."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from rotor.bench.ahead import compile_variant
from rotor.bench.precompile import NAMED_SHAPE, named_layouts
from rotor.bench.specialise import append_variant, decode_variants, layer_variants, materialise_variants
from rotor.kernels.defaults import default_layer

MOST_SPILLED_BYTES = 64
"""Of a thread, in kernels whose loop does not hold them."""


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("name", ["joint-128x2-fast", "apart-64", "numbers-64"])
def test_nothing_is_spilled(name, pages) -> None:
    layout = named_layouts()[name]
    variants = [append_variant(layout, NAMED_SHAPE, torch.bfloat16, 1, pages)]
    variants += materialise_variants(layout, NAMED_SHAPE, torch.bfloat16, pages)
    for variant in variants:
        assert compile_variant(variant, 90).spilled_bytes <= MOST_SPILLED_BYTES, variant.name


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", list(named_layouts()))
def test_decoding_spills_nothing(name, arch) -> None:
    layout = named_layouts()[name]
    for variant in decode_variants(layout, NAMED_SHAPE, default_layer(layout), torch.bfloat16, arch, page=64):
        assert compile_variant(variant, arch).spilled_bytes == 0, variant.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", list(named_layouts()))
def test_every_kernel_of_a_layer_compiles(name, arch) -> None:
    layout = named_layouts()[name]
    for variant in layer_variants(layout, NAMED_SHAPE, default_layer(layout), torch.bfloat16, arch, page=64):
        assert compile_variant(variant, arch).registers <= 255
