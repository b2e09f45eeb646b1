"""Kernels compiled for GPUs that need not be there: a step over pages spills nothing at the sizes of an 8B."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from rotor.tools.bench.sass import usage
from rotor.tools.bench.subjects import NAMED, PAGE, named_subjects
from rotor.tools.bench.variants import layer_variants

MOST_SPILLED_BYTES = 128
"""Of a thread, in kernels that no decode step over pages runs."""

QUICK = [("joint-128x2-fast", 90, PAGE), ("joint-64-fast-split", 90, PAGE), ("numbers-64", 80, 0)]
EVERY = [(name, arch, page) for name in NAMED for arch in (80, 90) for page in (0, PAGE)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in QUICK]


@pytest.mark.parametrize(("name", "arch", "page"), [*QUICK, *SLOW])
def test_nothing_is_spilled(name, arch, page) -> None:
    for variant in layer_variants(replace(named_subjects()[name], page=page), arch):
        registers, spilled_bytes = usage(variant.compile().asm["cubin"])
        assert registers <= 255
        assert spilled_bytes <= (0 if variant.keys and page else MOST_SPILLED_BYTES), variant.name
