"""Rows of a compressed layer cut for a tier of tokens: to the first places of each group's latents.

Channels stand most valuable first (of codes: most bits first), so that the beginning of a latent serves the smaller
rank. What is cut of a number counts as 0; of a code each nibble that is cut as its middle, which for a whole channel is
its mean to half a step: attention reads what is left with the first columns of the same basis, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..format.channels import NIBBLE_BITS, PLANE, WIDTHS, Channels, Latent, Numbers
from ..format.layout import GroupLayout, LayerLayout
from ..kernels.parameters import AttentionParameters


@dataclass(frozen=True)
class TierRows:
    """How attention reads the rows of a tier.

    layout: of the rows. basis: columns of the layer's query basis. query: of absorbed queries. output: places of the
    tier's outputs among the layer's. All are [kept], int64.
    """

    layout: LayerLayout
    basis: Tensor
    query: Tensor
    output: Tensor

    def reading(self, parameters: AttentionParameters, query: Tensor) -> tuple[AttentionParameters, Tensor]:
        """The layer's parameters and queries for these rows."""
        basis = parameters.query_basis
        if basis is None:
            return replace(parameters, layout=self.layout), query[..., self.query]
        return replace(parameters, layout=self.layout, query_basis=basis[:, self.basis]), query


def cut_layout(layout: LayerLayout, qk_ratio: float, v_ratio: float) -> LayerLayout:
    """The layout of rows without a share of each latent's places, from its end: to the nearest whole number of them (of
    codes: of planes), at least one."""
    groups = (
        GroupLayout(g.kv_heads, cut_latent(g.key, qk_ratio), g.value and cut_latent(g.value, v_ratio))
        for g in layout.groups
    )
    return replace(layout, groups=tuple(groups))


def cut_latent(latent: Latent, ratio: float) -> Latent:
    """The first channels of a latent. One that ends behind the last plane keeps its higher nibbles, uncounted."""
    if isinstance(latent, Numbers):
        return Numbers(_kept(latent.rank, ratio, 1))
    left = _kept(latent.width, ratio, PLANE)
    counts = []
    for bits, count in zip(WIDTHS, latent.counts, strict=True):
        nibbles = bits // NIBBLE_BITS
        counts.append(min(count, left // nibbles))
        left = left - count * nibbles if counts[-1] == count else 0
    return Channels(*counts)


def _kept(whole: int, ratio: float, step: int) -> int:
    return max(step, int((1 - ratio) * whole / step + 0.5) * step)


@lru_cache(maxsize=1024)
def tier_rows(whole: LayerLayout, cut: LayerLayout, heads_per_kv: int, device: torch.device) -> TierRows:
    """How rows `cut` from those of a layer are read, by so many query heads of a KV head."""
    heads = whole.group_size * heads_per_kv
    pairs = list(zip(whole.groups, cut.groups, strict=True))
    keys = [(group.key.width, own.key.width) for group, own in pairs]
    values = [(group.values.width, own.values.width) for group, own in pairs]
    parts = _beginnings(keys, 1), _beginnings(keys, heads), _beginnings(values, heads)
    return TierRows(cut, *(part.to(device) for part in parts))


def _beginnings(blocks: Sequence[tuple[int, int]], times: int) -> Tensor:
    """Indices of the first entries of neighbouring blocks, so many of each size in a row; blocks: (size, kept)."""
    index: list[int] = []
    start = 0
    for size, kept in blocks:
        for _ in range(times):
            index += range(start, start + kept)
            start += size
    return torch.tensor(index)
