"""The result type that every basis method returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BasisPair:
    """A pair of bases with encode decode^T close to the identity at full rank; of a joint latent, one side's rows of it.

    encode: [num_groups, dim, columns]; latent = x @ encode, for the stacked keys or values x of a group; a joint latent
        is the sum of that of both sides.
    decode: [num_groups, dim, columns]; x is read as latent @ decode^T, so q . x becomes (q @ decode) . latent.
    singular_values: [num_groups, columns], descending.
    """

    encode: Tensor
    decode: Tensor
    singular_values: Tensor

    @property
    def is_orthonormal(self) -> bool:
        return torch.equal(self.encode, self.decode)


def descending_eigh(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (clamped at zero) and eigenvectors in descending order, each vector's largest entry positive.

    Eigenvalues below the rounding error of the largest are set to zero, so that a direction that nothing uses has a
    singular value of exactly zero.

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
