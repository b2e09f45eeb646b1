"""Bytes of a cache that follows a policy, for any number of tokens, without a model: stored tensors are counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..format.layout import LayerLayout
from .policy import Policy

LONG_TOKENS = 32768
"""Tokens of context to which bytes are extrapolated."""


def packed_bytes_per_token(policy: Policy, layouts: Sequence[LayerLayout], dtype: torch.dtype, tokens: int) -> float:
    """Bytes of a compressed model's cache for each token of a prompt of `tokens`, all layers.

    Budgets that depend on the prompt (`squeeze`) are taken as equal, which they are in the mean.
    """
    total = 0
    for layer, layout in zip(policy.layers(len(layouts)), layouts, strict=True):
        widths = [size // (1 if layout.coded else dtype.itemsize) for size in layout.row_bytes(dtype.itemsize)]
        rows = [random_rows(1, tokens, width, torch.uint8 if layout.coded else dtype) for width in widths]
        layer.follow(layout, dtype)
        layer.fill(rows[0], rows[1])
        total += layer.stored_bytes()
    return total / tokens


def random_rows(heads: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """[1, heads, tokens, width] of random numbers, or bytes."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.uint8:
        return torch.randint(256, (1, heads, tokens, width), generator=generator, dtype=dtype)
    return torch.randn(1, heads, tokens, width, generator=generator).to(dtype)
