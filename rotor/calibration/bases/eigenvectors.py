"""Eigenvectors in descending order of eigenvalue, with signs that do not depend on the machine."""

from __future__ import annotations

import torch
from torch import Tensor


def descending_eigh(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues (clamped at zero) and eigenvectors in descending order, each vector's largest entry positive.

    Eigenvalues below the rounding error of the largest are set to zero, so that an unused direction has a singular
    value of exactly zero.

    Args:
        moments: [..., n, n], symmetric, float64.
    """
    values, vectors = torch.linalg.eigh(moments)
    values, vectors = values.flip(-1), vectors.flip(-1)
    noise = moments.shape[-1] * torch.finfo(torch.float64).eps * values[..., :1].clamp(min=0)
    return torch.where(values > noise, values, 0.0), positive_signs(vectors)


def positive_signs(vectors: Tensor) -> Tensor:
    """Flip each column so that its entry of largest magnitude is positive."""
    largest = vectors.abs().argmax(dim=-2, keepdim=True)
    return vectors * torch.where(vectors.gather(-2, largest) < 0, -1.0, 1.0)
