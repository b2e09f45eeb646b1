"""Bases of a group of KV heads: what turns keys and values into latents, and what reads the latents back.

One method a file. Every method returns a BasisPair of all columns in descending order of singular value; the first r
columns serve rank r. The methods take second moments or weights, batched over the groups of a layer, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..families import AttentionWeights
from ..layout import AttentionShape, Domain
from ..statistics import LayerStatistics
from . import kq, palu, svd
from .pair import BasisPair

__all__ = ["BasisPair", "LayerBases", "layer_bases", "needed_statistics"]


@dataclass(frozen=True)
class LayerBases:
    """Bases of one layer, batched over its groups [num_groups, ...].

    qk: encode is applied to keys, decode to queries (post) or to key latents to rebuild keys (pre).
    vo: encode is folded into W_v, decode into W_o.
    """

    domain: Domain
    group_size: int
    qk: BasisPair
    vo: BasisPair


def needed_statistics(qk_method: str, vo_method: str, domain: Domain) -> frozenset[str]:
    """Names of the moments in LayerStatistics that the methods read."""
    del qk_method
    needed = {"query", "key_pre" if domain == "pre" else "key_post"}
    if vo_method == "kq":
        needed.add("value")
    return frozenset(needed)


def layer_bases(
    statistics: LayerStatistics,
    weights: AttentionWeights,
    shape: AttentionShape,
    domain: Domain,
    qk_method: str,
    vo_method: str,
) -> LayerBases:
    """Compute both bases of one layer by the methods that a recipe names.

    Source: FDC section 5.1 (svd), ZACK section 5.1, Palu (palu), KQ-SVD, arXiv 2512.05916 (kq).
    """
    group_size = statistics.group_size
    keys = statistics.moment("key_pre" if domain == "pre" else "key_post")
    queries = statistics.moment("query")
    if domain == "pre":
        queries = rotary_average(queries)
    queries = block_diagonal(queries, group_size)
    qk = svd.from_moments(queries, keys) if qk_method == "svd" else kq.closed_form(read=queries, store=keys)

    if vo_method == "palu":
        vo = palu.from_weight(weights.v_weight, group_size * shape.head_dim)
    else:
        readers = block_diagonal(output_moments(weights.o_weight, shape), group_size)
        vo = kq.closed_form(read=readers, store=statistics.moment("value"))
    return LayerBases(domain, group_size, qk, vo)


def block_diagonal(moments: Tensor, group_size: int) -> Tensor:
    """[num_kv_heads, d, d] -> [num_groups, group_size * d, group_size * d], zero between heads.

    A query (or a column block of W_o) of one head touches only that head's block of the group's stacked keys.
    """
    heads, dim, _ = moments.shape
    groups = moments.new_zeros(heads // group_size, group_size, dim, group_size, dim)
    index = torch.arange(group_size)
    groups[:, index, :, index, :] = moments.reshape(-1, group_size, dim, dim).transpose(0, 1)
    return groups.reshape(-1, group_size * dim, group_size * dim)


def rotary_average(moments: Tensor) -> Tensor:
    """Second moments of queries averaged over all relative rotations: a diagonal with one weight per rotary frequency.

    Averaged over spread-out distances, the rotation between a query and a key leaves of the query's moment in each
    rotary plane only its mean square, and nothing between planes. Rotations do not change that mean square, so
    queries after RoPE serve as well as before it. Planes pair dimension i with i + d/2, as in transformers.

    Args:
        moments: [num_kv_heads, d, d].
    """
    half = moments.shape[-1] // 2
    squares = moments.diagonal(dim1=-2, dim2=-1)
    planes = (squares[..., :half] + squares[..., half:]) / 2
    return torch.diag_embed(torch.cat([planes, planes], dim=-1))


def output_moments(o_weight: Tensor, shape: AttentionShape) -> Tensor:
    """Per KV head the sum over its query heads of W_o,h^T W_o,h: [num_kv_heads, d, d], float64."""
    blocks = o_weight.to(torch.float64).reshape(-1, shape.num_kv_heads, shape.heads_per_kv, shape.head_dim)
    return torch.einsum("ohrd,ohre->hde", blocks, blocks)
