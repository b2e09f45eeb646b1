"""The best low-rank product of a reader and a store, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from .pair import BasisPair, descending_eigh, positive_signs

DAMPING = 1e-10
"""Share of the mean eigenvalue added to each moment, so that its square root can be inverted."""


def closed_form(read: Tensor, store: Tensor) -> BasisPair:
    """Minimise sum (q . x - q . x_r)^2 over all rank-r maps of what is stored, for reader q and store x.

    With read^(1/2) store^(1/2) = X S Y^T: encode = read^(1/2) X S^(-1/2), decode = store^(1/2) Y S^(-1/2). The squared
    error at rank r is the sum of the dropped S^2; at full rank encode decode^T = I.

    Args:
        read: [num_groups, n, n], sum q q^T of what reads the latent (queries; rows of W_o).
        store: [num_groups, n, n], sum x x^T of what is stored (keys; values).
    Source: KQ-SVD, arXiv 2512.05916, theorem 1; square roots by eigh, damped.
    """
    read_root, store_root = _square_root(read), _square_root(store)
    left, values, right = torch.linalg.svd(read_root @ store_root)
    signs = torch.where(positive_signs(left).mul(left).sum(-2, keepdim=True) < 0, -1.0, 1.0)
    scale = values.rsqrt().unsqueeze(-2)
    return BasisPair(read_root @ left * signs * scale, store_root @ right.mT * signs * scale, values)


def _square_root(moments: Tensor) -> Tensor:
    values, vectors = descending_eigh(moments)
    mean = values.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
    return vectors * (values + DAMPING * mean).sqrt().unsqueeze(-2) @ vectors.mT
