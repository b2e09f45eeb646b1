"""The view of a layer that the methods of bases compute from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.layout import AttentionShape, KeyForm
from ...checkpoint.projections import AttentionWeights
from .information import LayerFisher
from .moments import LayerStatistics, stored_name

FIRST = 0.1
"""They are one in hundreds, and bear up to half of the information; 0.02 to 2 do as well (artifacts/NOTES.md)."""


@dataclass(frozen=True)
class Inputs:
    """The view of one layer that a method computes from; gradients where a method reads them."""

    statistics: LayerStatistics
    weights: AttentionWeights
    form: KeyForm
    gradients: LayerFisher | None = None

    @property
    def shape(self) -> AttentionShape:
        return self.statistics.shape

    @property
    def group_size(self) -> int:
        return self.statistics.group_size

    @property
    def key_name(self) -> str:
        """Name of the keys that are compressed, as they are stored."""
        return stored_name(self.form)

    def keys(self) -> Tensor:
        """Moments of keys as they are stored [num_groups, n, n], n = group_size * head_dim."""
        return self.statistics.moment(self.key_name)

    def spread(self, name: str) -> Tensor:
        """Moments of keys or values about their mean [num_groups, n, n]; first tokens of rows count as FIRST of all."""
        assert self.gradients is not None  # who makes the inputs has looked at `BasisMethod.gradients`
        mean = self.statistics.sums[f"{name}_mean"] / self.statistics.tokens
        far = self.gradients.first(name) - mean
        outer = FIRST * far.unsqueeze(-1) * far.unsqueeze(-2) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return self.statistics.moment(name) + self.statistics.tokens * outer

    def information(self, name: str) -> Tensor:
        """E[g g^T] of the gradients by keys or values, [num_groups, n, n]."""
        assert self.gradients is not None
        return self.gradients.per_token(name)

    def queries(self) -> Tensor:
        """Moments of queries [num_groups, n, n], block-diagonal; averaged over relative positions, but after RoPE."""
        queries = self.statistics.moment("query")
        if self.form.rope_block is not None:
            queries = rotary_average(queries, self.shape.rotary_dim)
        return block_diagonal(queries, self.group_size)

    def values(self) -> Tensor:
        """Second moments of values [num_groups, n, n]."""
        return self.statistics.moment("value")

    def outputs(self) -> Tensor:
        """Second moments of attention outputs [num_groups, n, n], summed over the query heads of each group."""
        outputs = self.statistics.moment("output")
        return outputs.unflatten(0, (-1, self.group_size * self.shape.heads_per_kv)).sum(1)

    def readers(self) -> Tensor:
        """Second moment of the rows of W_o that read each head's values, block-diagonal [num_groups, n, n]."""
        return block_diagonal(output_moments(self.weights.o_weight, self.shape), self.group_size)


def block_diagonal(moments: Tensor, group_size: int) -> Tensor:
    """Place [num_kv_heads, d, d] into [num_groups, group_size * d, group_size * d], zero between heads.

    A query (or a column block of W_o) of one head touches only that head's block of the group's stacked keys.
    """
    heads, dim, _ = moments.shape
    groups = moments.new_zeros(heads // group_size, group_size, dim, group_size, dim)
    index = torch.arange(group_size)
    groups[:, index, :, index, :] = moments.reshape(-1, group_size, dim, dim).transpose(0, 1)
    return groups.reshape(-1, group_size * dim, group_size * dim)


def rotary_average(moments: Tensor, rotary_dim: int) -> Tensor:
    """Second moments of queries averaged over all relative rotations: one weight per rotary frequency.

    Averaged over many distances, the rotation between a query and a key leaves of the query's moment in each
    rotary plane only its mean square, and nothing between planes. Rotations do not change that mean square, so
    queries after RoPE serve as well as before it. Planes pair dimension i with i + rotary_dim/2, as in transformers;
    the dimensions after them are not rotated and keep their moment.

    Args:
        moments: [num_kv_heads, d, d].
        rotary_dim: dimensions that RoPE rotates, the first ones.
    """
    half = rotary_dim // 2
    squares = moments.diagonal(dim1=-2, dim2=-1)
    planes = (squares[..., :half] + squares[..., half:rotary_dim]) / 2
    average = torch.zeros_like(moments)
    average[..., :rotary_dim, :rotary_dim] = torch.diag_embed(torch.cat([planes, planes], dim=-1))
    average[..., rotary_dim:, rotary_dim:] = moments[..., rotary_dim:, rotary_dim:]
    return average


def output_moments(o_weight: Tensor, shape: AttentionShape) -> Tensor:
    """Per KV head the sum over its query heads of W_o,h^T W_o,h: [num_kv_heads, d, d], float64."""
    blocks = o_weight.to(torch.float64).reshape(-1, shape.num_kv_heads, shape.heads_per_kv, shape.head_dim)
    return torch.einsum("ohrd,ohre->hde", blocks, blocks)
