"""Closed form of the best low-rank product of a reader (queries, W_o) and what is stored (keys, values)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair
from .eigenvectors import descending_eigh, positive_signs
from .method import Inputs

DAMPING = 1e-10
"""Share of the mean eigenvalue added to each moment, so that its square root can be inverted."""


def closed_form(read: Tensor, store: Tensor, heads: int = 1) -> BasisPair:
    """Minimise sum (q . x - q . x_r)^2 over all rank-r maps x -> x_r of the stored vectors x, read by q.

    With read^(1/2) store^(1/2) = X S Y^T: encode = read^(1/2) X S^(-1/2), decode = store^(1/2) Y S^(-1/2). The squared
    error at rank r is the sum of the dropped S^2; at full rank encode decode^T = I.

    The code avoids that decomposition, which would take most of the time for one latent of many heads. For
    read = F F^T, X and S^2 are the eigenvectors and eigenvalues of F^T store F; encode = F X S^(-1/2) and
    decode = F^(-T) X S^(1/2). F and F^(-T) come from the eigh of each head. X is orthogonal and the scale cancels, so
    encode^T decode = I however small S is. S itself is exact to the square root of the rounding error of the largest.

    Args:
        read: [num_groups, n, n], sum q q^T of the vectors that read the latent (queries; rows of W_o).
        store: [num_groups, n, n], sum x x^T of the stored vectors (keys; values).
        heads: number of equal blocks on the diagonal of `read`.
    Source: KQ-SVD, arXiv 2512.05916, theorem 1; square roots by eigh, damped.
    """
    (read, read_scale), (store, store_scale) = _mean_one(read), _mean_one(store)
    blocks = read.unflatten(-1, (heads, -1)).unflatten(-3, (heads, -1)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    values, vectors = descending_eigh(blocks)  # [num_groups, heads, n / heads, ...]
    root = (values + DAMPING).sqrt().unsqueeze(-2)
    factor, inverse = vectors * root, vectors / root

    def times(left: Tensor, right: Tensor) -> Tensor:
        """Multiply a block-diagonal matrix by a dense one."""
        return (left @ right.unflatten(-2, (heads, -1))).flatten(-3, -2)

    damped = store + DAMPING * torch.eye(store.shape[-1], dtype=store.dtype)
    squares, left = torch.linalg.eigh(times(factor.mT, times(factor.mT, damped).mT))
    singular_values, left = squares.flip(-1).clamp(min=0).sqrt(), left.flip(-1)
    scale = torch.maximum(singular_values, torch.finfo(torch.float64).eps * singular_values[:, :1]).sqrt().unsqueeze(-2)
    alive = (read_scale > 0) & (store_scale > 0)
    scale = scale * torch.where(alive, store_scale / read_scale, 1.0) ** 0.25  # undoes `_mean_one`
    encode, decode = times(factor, left) / scale, times(inverse, left) * scale
    signs = torch.where(positive_signs(encode).mul(encode).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    return BasisPair(encode * signs, decode * signs, singular_values * (read_scale * store_scale).sqrt().squeeze(-1))


def _mean_one(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Scale moments to a mean eigenvalue of 1 (0 stays 0); returns them with the divisors, [num_groups, 1, 1]."""
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return torch.where(mean > 0, moments / mean, 0.0), mean.clamp(min=0)


def of_keys(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.queries(), inputs.keys(), inputs.group_size)


def of_values(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.readers(), inputs.values(), inputs.group_size)


def of_outputs(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.readers(), inputs.outputs(), inputs.group_size)
