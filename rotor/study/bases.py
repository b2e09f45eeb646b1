"""Distances between two sets of bases, and their spectra. Pure mathematics on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.linalg import subspace_angles
from scipy.stats import variation
from torch import Tensor
from torch.nn import functional

from ..bases.layer import LayerBases

SIDE_LABELS = {"qk": "QK", "vo": "V"}
"""Attributes of LayerBases: the query/key basis and the value/output basis."""

ANGLE_SHARES = (0.25, 0.5)
"""Shares of the channels that are kept where subspaces are compared."""


def basis_difference(bases: Iterable[Tensor], others: Iterable[Tensor]) -> dict[str, float]:
    """epsilon: mean absolute entry of the first; delta: mean absolute difference, signs of vectors aligned; and their
    ratio. Means over all heads and layers.

    Vectors are compared at norm 1: the papers' bases are orthonormal, those of the closed form are not, and their scale
    goes with the number of tokens. Vectors of (nearly) equal singular values can rotate into each other, which counts
    here as a difference; principal angles do not suffer from it.

    Args:
        bases, others: of each layer [num_groups, dim, channels], of equal shapes.
    Source: FDC section 3.2 (table 2), ZACK section 4.3 (tables 4 and 5).
    """
    sizes, differences = [], []
    for basis, other in zip(bases, others, strict=True):
        basis, other = functional.normalize(basis, dim=-2), functional.normalize(other, dim=-2)
        aligned = other * torch.where((basis * other).sum(-2, keepdim=True) < 0, -1.0, 1.0)
        sizes.append(basis.abs().mean((-2, -1)))
        differences.append((basis - aligned).abs().mean((-2, -1)))
    epsilon, delta = float(torch.cat(sizes).mean()), float(torch.cat(differences).mean())
    return {"epsilon": epsilon, "delta": delta, "ratio": delta / epsilon if epsilon else 0.0}


def compare_bases(bases: Sequence[LayerBases], others: Sequence[LayerBases]) -> dict[str, Any]:
    """Per side: `basis_difference`, and the mean and largest principal angles in degrees at ANGLE_SHARES."""
    result: dict[str, Any] = {}
    for side in SIDE_LABELS:
        pairs = [(getattr(a, side).encode, getattr(b, side).encode) for a, b in zip(bases, others, strict=True)]
        result[side] = {**basis_difference(*zip(*pairs, strict=True)), "angles_degrees": {}}
        for share in ANGLE_SHARES:
            found = [_angles(a, b, max(1, round(share * a.shape[-1]))) for a, b in pairs]
            angles = {"mean": float(np.mean([layer.mean() for layer in found])), "largest": max(map(np.max, found))}
            result[side]["angles_degrees"][f"{share:g}"] = {name: round(float(v), 4) for name, v in angles.items()}
    return result


def _angles(basis: Tensor, other: Tensor, rank: int) -> np.ndarray:
    """Between the spans of the first `rank` vectors, in degrees, [num_groups, rank]."""
    pairs = zip(basis[..., :rank].double().numpy(), other[..., :rank].double().numpy(), strict=True)
    return np.rad2deg([subspace_angles(first, second) for first, second in pairs])


def first_value_variation(bases: Sequence[LayerBases], side: str) -> float:
    """Standard deviation over mean of the largest singular value of all groups of all layers; 0 if the mean is 0.

    Source: FDC tables 3 and 4, ZACK tables 6 and 7.
    """
    values = torch.cat([getattr(layer, side).singular_values[:, 0] for layer in bases]).double()
    return float(np.nan_to_num(variation(values.numpy())))
