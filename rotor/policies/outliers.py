"""Outliers: a few numbers of each vector that are taken out and stored unquantised, beside their indices."""

from __future__ import annotations

import torch
from torch import Tensor

SHORT = torch.iinfo(torch.int16).max


def take_out(vectors: Tensor, share: float, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take the largest and the smallest share / 2 of each vector along `dim` out.

    Returns:
        Outliers and their indices along `dim`; and the vectors with the mean of what remains in their place, so that
        they do not widen the range.
    Source: GEAR section 3, equations 4 and 5; there zeros stand in their place.
    """
    length = vectors.shape[dim]
    count = int(share / 2 * length)
    order = vectors.argsort(dim)
    index = torch.cat([order.narrow(dim, 0, count), order.narrow(dim, length - count, count)], dim)
    return filled(vectors, index, dim)


def filled(vectors: Tensor, index: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take the numbers at `index` out; returns what `take_out` does."""
    outliers = vectors.gather(dim, index)
    rest = vectors.shape[dim] - index.shape[dim]
    mean = (vectors.sum(dim, keepdim=True) - outliers.sum(dim, keepdim=True)) / max(1, rest)
    return outliers, index, vectors.scatter(dim, index, mean.expand_as(outliers))


def stored_index(index: Tensor, length: int) -> Tensor:
    """Indices below `length` in the smallest type that holds them."""
    return index.to(torch.int16 if length <= SHORT else torch.int32)
