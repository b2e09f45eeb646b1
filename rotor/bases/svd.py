"""Right singular vectors of the stacked [Q; K]: one rotation for queries and keys."""

from __future__ import annotations

from torch import Tensor

from .pair import BasisPair, descending_eigh


def from_moments(queries: Tensor, keys: Tensor) -> BasisPair:
    """SVD of the rows of Q and K together, from their second moments.

    Args:
        queries: [num_groups, n, n], sum q q^T, block-diagonal over the heads of a group.
        keys: [num_groups, n, n], sum k k^T.
    Returns:
        An orthonormal pair (encode = decode). Singular values are those of the stacked matrix.
    Source: FDC section 5.1, figure 6.
    """
    values, vectors = descending_eigh(queries + keys)
    return BasisPair(vectors, vectors, values.sqrt())
