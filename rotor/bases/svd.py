"""Right singular vectors of stacked rows: one rotation for both sides."""

from __future__ import annotations

from torch import Tensor

from .method import BasisMethod
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


_READS_BOTH, _READS_KEYS, _READS_VALUES = frozenset({"query", "key"}), frozenset({"key"}), frozenset({"value"})

METHODS = (
    BasisMethod(
        "qk",
        "svd",
        "SVD of the stacked queries and keys, one rotation for both (FDC section 5.1)",
        lambda i: from_moments(i.queries(), i.keys()),
        _READS_BOTH,
        ("post", "none"),
    ),
    BasisMethod(
        "qk",
        "whitened",
        "SVD of the keys, which is that of W_k whitened by its input (Palu section 3.3)",
        lambda i: of_moment(i.keys()),
        _READS_KEYS,
        ("pre", "none"),
    ),
    BasisMethod(
        "vo",
        "svd",
        "SVD of the values stacked with the rows of W_o that read them (ZACK section 5.1)",
        lambda i: from_moments(i.readers(), i.values()),
        _READS_VALUES,
    ),
    BasisMethod(
        "vo",
        "whitened",
        "SVD of the values, which is that of W_v whitened by its input (Palu section 3.3)",
        lambda i: of_moment(i.values()),
        _READS_VALUES,
    ),
)
