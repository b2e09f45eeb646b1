"""Decoding where multiplications and additions are fused, as on a GPU: slices in which a query row sees no key yet.

The interpreter rounds every product. A GPU rounds a product and a sum once, so that a number less itself, made in two
ways, is not 0: of masked logits the rest is some 1e21, and its power of two 0 or infinity.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import triton
import triton.language as tl
from check_decode import HALF, check, layer_of
from support.quick import mostly_nightly
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 product is added to, or subtracted, before it is rounded (in float64, which holds it exactly)."""
    builder = interpreter.InterpreterBuilder
    multiply = builder.create_fmul

    def product(self: Any, lhs: Any, rhs: Any) -> Any:
        result = multiply(self, lhs, rhs)
        if result.data.dtype == numpy.float32:
            result.exact = lhs.data.astype(numpy.float64) * rhs.data
        return result

    def fuse(name: str, operation: Any) -> None:
        plain = getattr(builder, name)

        def call(self: Any, lhs: Any, rhs: Any) -> Any:
            result = plain(self, lhs, rhs)
            if hasattr(lhs, "exact"):
                result.data = operation(lhs.exact, rhs.data).astype(numpy.float32)
            elif hasattr(rhs, "exact"):
                result.data = operation(lhs.data, rhs.exact).astype(numpy.float32)
            return result

        monkeypatch.setattr(builder, name, call)

    monkeypatch.setattr(builder, "create_fmul", product)
    fuse("create_fadd", numpy.add)
    fuse("create_fsub", numpy.subtract)


@triton.jit
def residue_kernel(out, x, scale):
    number = tl.load(x)
    rounded = number * scale
    tl.store(out, number * scale - rounded)


def test_products_are_fused() -> None:
    x, out = torch.tensor([-1e30]), torch.zeros(1)
    residue_kernel[1,](out, x, 64**-0.5 * 1.4426950408889634)
    assert 1e20 < abs(float(out)) < 1e23


HEADS = [64, 80, 96, 128, 256]


@pytest.mark.parametrize("head_dim", mostly_nightly(HEADS, lambda head_dim: head_dim == 64))
def test_a_slice_of_hidden_keys(head_dim: int) -> None:
    """First tokens and a window: one slice sees nothing, and the last one nothing in its first tile."""
    check(layer_of([32], 1, block=64), [300], hidden=(4, 290), head_dim=head_dim, per_head=1)


@pytest.mark.parametrize("head_dim", mostly_nightly(HEADS, lambda head_dim: head_dim == 64))
def test_several_tokens_across_the_edge_of_a_tile(head_dim: int) -> None:
    """With a window the last tokens see nothing of the first tile, without one the first tokens nothing of the last."""
    check(layer_of([32], 1, block=64), [105, 66], [3, 3], window=40, head_dim=head_dim, per_head=1)
    check(layer_of([32], 1, block=None), [130, 193], [4, 2], head_dim=head_dim, per_head=1, programs=40)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_sequence_that_is_hidden_throughout(softcap: float | None) -> None:
    rest = {} if softcap is None else {"softcap": softcap}
    check(layer_of([32], 1), [150, 90], hidden=(0, 300), dtype=HALF, per_head=1, **rest)
    check(layer_of([32], 1), [150, 90], [2, 2], hidden=(0, 120), dtype=HALF, per_head=1, **rest)
