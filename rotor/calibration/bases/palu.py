"""Left singular vectors of the key or value projection, computed from weights alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair
from .eigenvectors import positive_signs
from .method import Inputs


def from_weight(weight: Tensor, rows: int) -> BasisPair:
    """Decompose each group's rows of W_k or W_v.

    Args:
        weight: [num_groups * rows, hidden_size], any dtype.
        rows: group_size * head_dim.
    Returns:
        An orthonormal pair (encode = decode), as many columns as rows.
    Source: Palu, arXiv 2407.21118; FDC section 5.2 ("the singular values of V are obtained by decomposing W_V").
    """
    blocks = weight.to(torch.float64).reshape(-1, rows, weight.shape[-1])
    vectors, values, _ = torch.linalg.svd(blocks, full_matrices=True)
    values = torch.nn.functional.pad(values, (0, rows - values.shape[-1]))
    noise = max(blocks.shape[-2:]) * torch.finfo(torch.float64).eps * values[:, :1]
    vectors = positive_signs(vectors)
    return BasisPair(vectors, vectors, torch.where(values > noise, values, 0.0))


def of_key_projection(inputs: Inputs) -> BasisPair:
    return from_weight(inputs.weights.k_weight, inputs.group_size * inputs.shape.head_dim)


def of_value_projection(inputs: Inputs) -> BasisPair:
    return from_weight(inputs.weights.v_weight, inputs.group_size * inputs.shape.head_dim)
