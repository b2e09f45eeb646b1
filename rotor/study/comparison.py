"""Distances between two sets of bases, and differences of spectra between heads. Pure mathematics on tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bases.layer import LayerBases
from ..errors import UsageError

SIDES = ("qk", "vo")
"""Attributes of LayerBases: the query/key basis and the value/output basis."""


@dataclass(frozen=True)
class BasisDifference:
    """Element-wise difference of two sets of bases.

    epsilon: mean absolute entry of the first. delta: mean absolute difference, each vector's sign aligned.
    """

    epsilon: float
    delta: float

    @property
    def ratio(self) -> float:
        """delta over epsilon; 0 for equal bases."""
        return self.delta / self.epsilon if self.epsilon else 0.0


def unit_columns(basis: Tensor) -> Tensor:
    """Columns scaled to norm 1 (zero columns stay), so that bases of different scale can be compared.

    Args:
        basis: [..., dim, columns].
    """
    norms = torch.linalg.vector_norm(basis, dim=-2, keepdim=True)
    return basis / torch.where(norms > 0, norms, 1.0)


def align_signs(basis: Tensor, other: Tensor) -> Tensor:
    """Flip the sign of each column of `other` where that brings it closer to the same column of `basis`.

    Args:
        basis, other: [..., dim, columns].
    """
    return other * torch.where((basis * other).sum(-2, keepdim=True) < 0, -1.0, 1.0)


def basis_difference(bases: Iterable[Tensor], others: Iterable[Tensor]) -> BasisDifference:
    """Delta and epsilon over all heads and layers: means over matrices of each matrix's mean absolute entry.

    Columns are compared at norm 1: the papers' bases are orthonormal, those of the closed form are not, and their scale
    goes with the number of tokens. Vectors of (nearly) equal singular values can turn into each other, which counts
    here as a difference; `principal_angles` does not suffer from it.

    Args:
        bases, others: of each layer [num_groups, dim, columns], of equal shapes.
    Raises:
        UsageError: no bases, or shapes that differ.
    Source: FDC section 3.2 (table 2), ZACK section 4.3 (tables 4 and 5).
    """
    sizes, differences = [], []
    for layer, (basis, other) in enumerate(zip(bases, others, strict=True)):
        _check_shapes(basis, other, layer)
        basis, other = unit_columns(basis), unit_columns(other)
        sizes.append(basis.abs().mean((-2, -1)))
        differences.append((basis - align_signs(basis, other)).abs().mean((-2, -1)))
    if not sizes:
        raise UsageError("there are no bases to compare.")
    return BasisDifference(float(torch.cat(sizes).mean()), float(torch.cat(differences).mean()))


def principal_angles(basis: Tensor, other: Tensor, rank: int) -> Tensor:
    """Principal angles between the spans of the first `rank` columns: [num_groups, rank], radians, largest first.

    Angles below 45 degrees come from sines, the others from cosines, so that both ends are accurate.

    Args:
        basis, other: [num_groups, dim, columns], columns need not be orthonormal.
        rank: number of leading columns, from 1 to `columns`.
    Raises:
        UsageError: shapes that differ, or a rank out of range.
    Source: Bjorck and Golub 1973; Knyazev and Argentati 2002 for the sines.
    """
    _check_shapes(basis, other, None)
    if not 1 <= rank <= basis.shape[-1]:
        raise UsageError(f"rank {rank}: expected 1 to {basis.shape[-1]}, the columns of the bases.")
    first = torch.linalg.qr(basis[..., :rank].double()).Q
    second = torch.linalg.qr(other[..., :rank].double()).Q
    overlap = first.mT @ second
    cosines = torch.linalg.svdvals(overlap).flip(-1).clamp(max=1.0)  # ascending: the largest angle first
    sines = torch.linalg.svdvals(second - first @ overlap)[..., :rank].clamp(max=1.0)  # descending, likewise
    return torch.where(cosines**2 > 0.5, sines.asin(), cosines.acos())


def coefficient_of_variation(values: Tensor) -> float:
    """Standard deviation (of the population) over mean; 0 if the mean is 0.

    Source: FDC tables 3 and 4, ZACK tables 6 and 7, on the largest singular value of every head.
    """
    mean = values.double().mean()
    return float(values.double().std(correction=0) / mean) if mean else 0.0


def encoders(bases: list[LayerBases], side: str) -> list[Tensor]:
    """List the encoding bases of one side, of every layer: [num_groups, dim, columns]."""
    return [getattr(layer, side).encode for layer in bases]


def largest_singular_values(bases: list[LayerBases], side: str) -> Tensor:
    """The first singular value of every group of every layer: [groups of all layers]."""
    return torch.cat([getattr(layer, side).singular_values[:, 0] for layer in bases])


def mean_spectrum(bases: list[LayerBases], side: str) -> Tensor:
    """Singular values over the group's largest, averaged over groups and layers: [columns], starting at 1.

    Layers with fewer columns than the widest count as zero beyond their last.
    """
    spectra = [getattr(layer, side).singular_values for layer in bases]
    widest = max(s.shape[-1] for s in spectra)
    scaled = [s / torch.where(s[:, :1] > 0, s[:, :1], 1.0) for s in spectra]
    return torch.cat([torch.nn.functional.pad(s, (0, widest - s.shape[-1])) for s in scaled]).mean(0)


def relative_difference(reference: Tensor, other: Tensor) -> float:
    """Sum of absolute differences over the sum of absolute entries of `reference`; 0 if that is 0."""
    size = reference.abs().sum(dtype=torch.float64)
    return float((reference - other).abs().sum(dtype=torch.float64) / size) if size else 0.0


def _check_shapes(basis: Tensor, other: Tensor, layer: int | None) -> None:
    if basis.shape != other.shape:
        where = "" if layer is None else f"layer {layer}: "
        raise UsageError(
            f"{where}bases of shapes {list(basis.shape)} and {list(other.shape)} cannot be compared.",
            "Compare calibrations of one recipe, with equal groups.",
        )
