"""Keys and values as they are: no basis, the channels of each head in the order of what they are worth.

What is left of a recipe when its basis is taken away; a study measures by it what the basis is worth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair
from .method import Inputs


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


def of_keys(inputs: Inputs) -> BasisPair:
    return from_moments(inputs.queries(), inputs.keys())


def of_values(inputs: Inputs) -> BasisPair:
    return from_moments(inputs.readers(), inputs.values())
