"""Right singular vectors of a matrix: one rotation as both encode and decode."""

from __future__ import annotations

from torch import Tensor

from ...checkpoint.bases import BasisPair
from .eigenvectors import descending_eigh
from .method import Inputs


def of_moment(moment: Tensor) -> BasisPair:
    """Compute the SVD of a matrix with rows x from its second moment, sum x x^T, [num_groups, n, n].

    The moment of two stacked matrices is the sum of their moments.

    Returns:
        An orthonormal pair (encode = decode). Singular values are those of the (stacked) matrix.
    """
    values, vectors = descending_eigh(moment)
    return BasisPair(vectors, vectors, values.sqrt())


def of_queries_and_keys(inputs: Inputs) -> BasisPair:
    """Rotation of queries stacked with keys. If the two differ in size, the larger one dominates.

    Source: FDC section 5.1, figure 6.
    """
    return of_moment(inputs.queries() + inputs.keys())


def of_keys(inputs: Inputs) -> BasisPair:
    """Rotation of keys; before RoPE this is W_k whitened by its input. Source: Palu, arXiv 2407.21118, section 3.3."""
    return of_moment(inputs.keys())


def of_readers_and_values(inputs: Inputs) -> BasisPair:
    """Rotation of values stacked with the rows of W_o that read them. Source: ZACK section 4.3, figure 9."""
    return of_moment(inputs.readers() + inputs.values())


def of_values(inputs: Inputs) -> BasisPair:
    """Rotation of values: W_v whitened by its input. Source: as for keys."""
    return of_moment(inputs.values())
