"""The result type that every basis method returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BasisPair:
    """A pair of bases with encode decode^T close to the identity at full rank; or one side's rows of a joint latent's.

    encode: [num_groups, dim, columns]; latent = x @ encode, for the stacked keys or values x of a group; a joint latent
        is the sum of that of both sides.
    decode: [num_groups, dim, columns]; x is read as latent @ decode^T, so q . x becomes (q @ decode) . latent.
    singular_values: [num_groups, columns], descending.
    shift: [num_groups, columns], is added to the latent, and constant: [num_groups, dim], to what is read; where bases
        were trained. Both rows of a joint latent have the same shift, which is added once.
    """

    encode: Tensor
    decode: Tensor
    singular_values: Tensor
    shift: Tensor | None = None
    constant: Tensor | None = None

    def ordered(self, order: Tensor) -> BasisPair:
        """The columns of each group in another order, [num_groups, columns]."""
        index = order.unsqueeze(1).expand_as(self.encode)
        return BasisPair(
            self.encode.gather(-1, index),
            self.decode.gather(-1, index),
            self.singular_values.gather(-1, order),
            None if self.shift is None else self.shift.gather(-1, order),
            self.constant,
        )


def split_pair(joint: BasisPair, group_size: int) -> tuple[BasisPair, BasisPair]:
    """The rows of keys and those of values of bases over both: of each head its key, then its value."""

    def side(index: int) -> BasisPair:
        def rows(basis: Tensor) -> Tensor:
            return basis.unflatten(1, (group_size, 2, -1))[:, :, index].flatten(1, 2)

        constant = None if joint.constant is None else rows(joint.constant)
        shift = None if joint.shift is None else joint.shift.clone()
        return BasisPair(rows(joint.encode), rows(joint.decode), joint.singular_values.clone(), shift, constant)

    return side(0), side(1)


def stacked_pair(keys: BasisPair, values: BasisPair, group_size: int) -> BasisPair:
    """What `split_pair` took apart."""

    def rows(*sides: Tensor) -> Tensor:
        return torch.stack([side.unflatten(1, (group_size, -1)) for side in sides], dim=2).flatten(1, 3)

    return BasisPair(rows(keys.encode, values.encode), rows(keys.decode, values.decode), keys.singular_values)


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
