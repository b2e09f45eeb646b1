"""Cut what a layer stores down to smaller ranks, as an elastic checkpoint is when one of its profiles is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError
from .layout import AttentionShape, GroupLayout, LayerLayout, LayerRanks, ordered_by_class


def truncate_layer(
    tensors: dict[str, Tensor], layout: LayerLayout, ranks: LayerRanks, shape: AttentionShape
) -> tuple[LayerLayout, dict[str, Tensor]]:
    """Cut the projections of a layer down to smaller ranks: leading columns of each group, groups ordered anew.

    Columns are nested, so this gives what rewriting at these ranks would have given (without refit, which is not).

    Args:
        tensors: as `rewrite_layer` returns them for `layout`.
        ranks: (qk_rank, v_rank) of each group in the order of `layout`; none above what is stored.
    Raises:
        UsageError: the layer keeps rows of codes, whose columns are ordered by bits.
    """
    if layout.coded:
        raise UsageError(
            "rank profiles need columns of 16 bits, and this checkpoint has columns of fewer, ordered by bits rather "
            "than by what they are worth.",
            "Export one checkpoint for each accuracy, or an elastic one of columns of 16 bits (recipe rotor-16).",
        )
    groups = [
        GroupLayout(group.kv_heads, qk_rank, v_rank, group.planes[: qk_rank // 2])
        for group, (qk_rank, v_rank) in zip(layout.groups, ranks, strict=True)
    ]
    smaller, order = ordered_by_class(layout.domain, layout.folded_keys, groups, layout.rope_block)
    heads = layout.group_size * shape.heads_per_kv
    qk, v = [g.qk_rank for g in layout.groups], [g.v_rank for g in layout.groups]

    def cut(tensor: Tensor, dim: int, per_group: int, stored: list[int], side: int | None) -> Tensor:
        """Each group's block along `dim` holds per_group x stored entries; keep the leading ones of each."""
        blocks = tensor.split([per_group * width for width in stored], dim)
        parts = []
        for index in order:
            block = blocks[index].unflatten(dim, (per_group, stored[index]))
            keep = stored[index] if side is None else ranks[index][side]
            parts.append(block.narrow(dim + 1, 0, keep).flatten(dim, dim + 1))
        return torch.cat(parts, dim)

    head_dims = [shape.head_dim] * len(groups)
    plain = layout.domain != "none"
    result = {}
    for name, tensor in tensors.items():
        if name.startswith("q_proj"):
            result[name] = cut(tensor, 0, heads, head_dims if plain else qk, None if plain else 0)
        elif name.startswith("k_proj"):
            per_group = 1 if layout.folded_keys else layout.group_size
            result[name] = cut(
                tensor, 0, per_group, qk if layout.folded_keys else head_dims, 0 if layout.folded_keys else None
            )
        elif name.startswith("v_proj"):
            result[name] = cut(tensor, 0, 1, v, 1)
        elif name == "o_proj.weight":
            result[name] = cut(tensor, 1, heads, v, 1)
        elif name in ("key_basis", "query_basis"):
            result[name] = cut(tensor, 1, 1, qk, 0)
        else:
            result[name] = tensor
    return smaller, {name: tensor.contiguous() for name, tensor in result.items()}
