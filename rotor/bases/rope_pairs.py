"""Whole rotary planes, kept or dropped: the only bases that commute with RoPE."""

from __future__ import annotations

import torch
from torch import Tensor

from .method import Inputs
from .pair import BasisPair


def from_moments(queries: Tensor, keys: Tensor, head_dim: int, rotary_dim: int | None = None) -> BasisPair:
    """Order the rotary planes of each head by the energy of their share of the logits.

    A plane pairs dimension i with i + rotary_dim/2; dimensions that RoPE does not turn are paired likewise. Its
    singular value is sqrt(sum |q|^2 sum |k|^2) over the plane, each of its two columns getting half of it; the columns
    are unit vectors, so where RoPE turns all dimensions the basis is folded into W_q and W_k (unless keys are normed
    behind it), and RoPE turns the latents by the columns of its table that belong to their planes.

    Args:
        queries, keys: [num_groups, n, n], second moments after RoPE; n = group_size * head_dim.
        rotary_dim: dimensions of a head that RoPE turns, the first ones (None: all); even, as is head_dim.
    Source: the rotations of RoPE (RoFormer, arXiv 2104.09864, equation 15): only maps inside one rotary frequency
    commute with them.
    """
    width, turned = keys.shape[-1], head_dim if rotary_dim is None else rotary_dim
    parts = torch.arange(turned), torch.arange(turned, head_dim)
    pairs = torch.cat([part.reshape(2, -1).T for part in parts])  # [head_dim / 2, 2]
    heads = torch.arange(0, width, head_dim)[:, None, None]
    pairs = (heads + pairs).flatten(0, 1)
    energies = [moment.diagonal(dim1=-2, dim2=-1)[:, pairs].sum(-1) for moment in (queries, keys)]
    planes = (energies[0] * energies[1]).sqrt()  # [num_groups, group_size * head_dim / 2]
    values, order = planes.sort(dim=-1, descending=True, stable=True)
    columns = pairs[order].flatten(-2)
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


def of_keys(inputs: Inputs) -> BasisPair:
    return from_moments(inputs.queries(), inputs.keys(), inputs.shape.head_dim, inputs.shape.turned)
