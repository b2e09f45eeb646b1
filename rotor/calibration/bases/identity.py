"""No basis: keys and values as they are, with the channels of each head ordered by their energy.

A study compares other bases with it to measure their gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair
from .method import Inputs


def from_moments(readers: Tensor, stored: Tensor) -> BasisPair:
    """Order the channels of each group by the energy that they contribute to logits or outputs.

    Without channel i the logits (or outputs) change by the product of the stored number and its reader, so its singular
    value is sqrt(sum |reader_i|^2 sum |stored_i|^2).

    Args:
        readers, stored: [num_groups, n, n], second moments of queries and keys, or of rows of W_o and values.
    """
    energy = (readers.diagonal(dim1=-2, dim2=-1) * stored.diagonal(dim1=-2, dim2=-1)).sqrt()
    values, order = energy.sort(dim=-1, descending=True, stable=True)
    basis = torch.eye(stored.shape[-1], dtype=stored.dtype)[order].mT
    return BasisPair(basis, basis, values)


def of_keys(inputs: Inputs) -> BasisPair:
    return from_moments(inputs.queries(), inputs.keys())


def of_values(inputs: Inputs) -> BasisPair:
    return from_moments(inputs.readers(), inputs.values())
