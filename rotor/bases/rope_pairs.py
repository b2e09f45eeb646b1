"""Whole rotary planes, kept or dropped: the only bases that commute with RoPE."""

from __future__ import annotations

import torch
from torch import Tensor

from .pair import BasisPair


def from_moments(queries: Tensor, keys: Tensor, head_dim: int) -> BasisPair:
    """Order the rotary planes of each head by the energy of their share of the logits.

    A plane pairs dimension i with i + d/2. Its singular value is sqrt(sum |q|^2 sum |k|^2) over the plane, each of its
    two columns getting half of it; the columns are unit vectors, so the basis is folded into W_q and W_k (unless keys
    are normed behind it), and RoPE turns the latents by the columns of its table that belong to their planes.

    Args:
        queries, keys: [num_groups, n, n], second moments after RoPE; n = group_size * head_dim.
    Source: DESIGN section 1 (only maps inside one rotary frequency commute with RoPE).
    """
    width, half = keys.shape[-1], head_dim // 2
    energies = [
        moment.diagonal(dim1=-2, dim2=-1).unflatten(-1, (-1, 2, half)).sum(-2).flatten(-2) for moment in (queries, keys)
    ]
    planes = (energies[0] * energies[1]).sqrt()  # [num_groups, group_size * half]
    values, order = planes.sort(dim=-1, descending=True, stable=True)
    first = order // half * head_dim + order % half
    columns = torch.stack([first, first + half], dim=-1).flatten(-2)
    basis = torch.eye(width, dtype=keys.dtype)[columns].mT
    return BasisPair(basis, basis, (values / 2).repeat_interleave(2, dim=-1))


def planes(basis: Tensor, head_dim: int) -> Tensor:
    """The rotary frequency of each pair of columns of such a basis.

    Args:
        basis: [num_groups, group_size * head_dim, columns], as `from_moments` gives it.
    Returns:
        [num_groups, columns / 2].
    """
    return basis[..., ::2].argmax(-2) % head_dim % (head_dim // 2)
