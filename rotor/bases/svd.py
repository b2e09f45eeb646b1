"""Right singular vectors of stacked rows: one rotation for both sides."""

from __future__ import annotations

from torch import Tensor

from .method import Inputs
from .pair import BasisPair, descending_eigh


def from_moments(first: Tensor, second: Tensor) -> BasisPair:
    """SVD of two sets of rows together, from their second moments: queries and keys, or values and rows of W_o.

    Fragile where the two sides differ in size: the larger one decides.

    Args:
        first, second: [num_groups, n, n], sum x x^T.
    Returns:
        An orthonormal pair (encode = decode). Singular values are those of the stacked matrix.
    Source: FDC section 5.1, figure 6; ZACK section 5.1 for V with W_L.
    """
    return of_moment(first + second)


def of_moment(moment: Tensor) -> BasisPair:
    """SVD of rows from their second moment [num_groups, n, n].

    For keys before RoPE or for values this is Palu's decomposition of the projection whitened by its input.

    Source: Palu, arXiv 2407.21118, section 3.3 (whitening).
    """
    values, vectors = descending_eigh(moment)
    return BasisPair(vectors, vectors, values.sqrt())


def of_queries_and_keys(inputs: Inputs) -> BasisPair:
    return from_moments(inputs.queries(), inputs.keys())


def of_keys(inputs: Inputs) -> BasisPair:
    return of_moment(inputs.keys())


def of_readers_and_values(inputs: Inputs) -> BasisPair:
    return from_moments(inputs.readers(), inputs.values())


def of_values(inputs: Inputs) -> BasisPair:
    return of_moment(inputs.values())
