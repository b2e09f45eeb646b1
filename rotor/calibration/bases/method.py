"""Inputs of the methods that compute bases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.layout import AttentionShape, KeyForm
from ...checkpoint.projections import AttentionWeights
from ..information import LayerFisher
from ..moments import LayerStatistics, stored_name

FIRST_TOKEN_WEIGHT = 0.1
"""Weight of first tokens (attention sinks) in the spread of keys and values. They are under 1 % of the tokens and carry
up to half of the Fisher information; results are flat from 0.02 to 2 (artifacts/NOTES.md)."""


@dataclass(frozen=True)
class Inputs:
    """Moments and weights of one layer, and its gradients if a method reads them."""

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
        """Name of the moments of stored keys."""
        return stored_name(self.form)

    def keys(self) -> Tensor:
        """Second moments of stored keys [num_groups, n, n], n = group_size * head_dim."""
        return self.statistics.moment(self.key_name)

    def spread(self, name: str) -> Tensor:
        """Second moments of keys or values about their mean, [num_groups, n, n].

        First tokens of sequences are added with FIRST_TOKEN_WEIGHT of all tokens' weight.
        """
        assert self.gradients is not None  # the caller has checked `BasisMethod.gradients`
        mean = self.statistics.sums[f"{name}_mean"] / self.statistics.tokens
        far = self.gradients.first(name) - mean
        outer = FIRST_TOKEN_WEIGHT * far.unsqueeze(-1) * far.unsqueeze(-2) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return self.statistics.moment(name) + self.statistics.tokens * outer

    def information(self, name: str) -> Tensor:
        """E[g g^T] of the gradients by keys or values, [num_groups, n, n]."""
        assert self.gradients is not None
        return self.gradients.per_token(name)

    def queries(self) -> Tensor:
        """Second moments of queries [num_groups, n, n], block-diagonal.

        If keys are not stored after RoPE, they are averaged over relative positions.
        """
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

    A query (or a column block of W_o) of one head reads only that head's block of the group's stacked keys.
    """
    heads, dim, _ = moments.shape
    groups = moments.new_zeros(heads // group_size, group_size, dim, group_size, dim)
    index = torch.arange(group_size)
    groups[:, index, :, index, :] = moments.reshape(-1, group_size, dim, dim).transpose(0, 1)
    return groups.reshape(-1, group_size * dim, group_size * dim)


def rotary_average(moments: Tensor, rotary_dim: int) -> Tensor:
    """Average second moments of queries over all relative rotations: one weight per rotary frequency.

    The average over many distances between query and key keeps only the mean square of each rotary plane, and nothing
    between planes. Rotations do not change that mean square, so queries after RoPE can be used in place of those before
    it. Planes pair dimension i with i + rotary_dim/2, as in transformers; the other dimensions are not rotated and keep
    their moments.

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
    """Sum W_o,h^T W_o,h over the query heads h of each KV head: [num_kv_heads, d, d], float64."""
    blocks = o_weight.to(torch.float64).reshape(-1, shape.num_kv_heads, shape.heads_per_kv, shape.head_dim)
    return torch.einsum("ohrd,ohre->hde", blocks, blocks)
