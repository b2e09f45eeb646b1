"""Keys and values as they are: no basis, the channels of each head in the order of what they are worth.

What is left of a recipe when its basis is taken away; a study measures by it what the basis is worth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .method import BasisMethod
from .pair import BasisPair


def from_moments(readers: Tensor, stored: Tensor) -> BasisPair:
    """Order the channels of each group by the energy of their share of what is computed from them.

    Dropping channel i changes the logits (or the outputs) by the product of what is stored and what reads it, so that
    its singular value is sqrt(sum |reader_i|^2 sum |stored_i|^2).

    Args:
        readers, stored: [num_groups, n, n], second moments of queries and keys, or of rows of W_o and values.
    """
    worth = (readers.diagonal(dim1=-2, dim2=-1) * stored.diagonal(dim1=-2, dim2=-1)).sqrt()
    values, order = worth.sort(dim=-1, descending=True, stable=True)
    basis = torch.eye(stored.shape[-1], dtype=stored.dtype)[order].mT
    return BasisPair(basis, basis, values)


METHODS = (
    BasisMethod(
        "qk",
        "identity",
        "keys as they are, channels in the order of their share of the logits; to compare with",
        lambda i: from_moments(i.queries(), i.keys()),
        frozenset({"query", "key"}),
    ),
    BasisMethod(
        "vo",
        "identity",
        "values as they are, channels in the order of their share of the output; to compare with",
        lambda i: from_moments(i.readers(), i.values()),
        frozenset({"value"}),
    ),
)
