"""Attention to a cache in tiers: each block of rows by itself, joined by its log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..format.layout import LayerLayout
from ..kernels.code_reference import partial_attention
from ..kernels.dispatch import widths_fit
from ..kernels.joining import join
from ..kernels.parameters import AttentionParameters
from ..kernels.reference import project_queries
from .cache.tier_rows import TierRows
from .cache.tiered_layer import Block, TieredLayer, rows_of_tiers
from .cache.tiers import Tiers

if TYPE_CHECKING:
    from .attention import RotorAttention


Partial = Callable[..., tuple[Tensor, Tensor]]
"""As `partial_attention`, its arguments in their order; queries come projected but in domain `pre`."""


def tiers_fit_kernels(policy: Tiers, module: RotorAttention, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernels have tiles for the rows of both tiers of a layer, which they read one after the other.

    Keys before RoPE run in plain PyTorch: kernels turn a key by its place in the rows, which is not that in the
    sequence where rows are a tier's.
    """
    if module.layout.domain == "pre" or torch.compiler.is_compiling():
        return False
    high, low, _ = rows_of_tiers(policy, module.layout, module.heads_per_kv, dtype, device)
    return all(widths_fit(rows.layout, module.heads_per_kv, module.head_dim, dtype, device) for rows in (high, low))


def attend_to_tiers(
    parameters: AttentionParameters,
    layer: TieredLayer,
    query: Tensor,
    mask: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None,
    partial: Partial = partial_attention,
) -> tuple[Tensor, Tensor]:
    """Attention to all blocks that a layer holds.

    Args:
        parameters: of the layer, whole.
        query, mask: as in `grouped_attention`, over all tokens so far; queries of domain `post` may come projected.
        key_rotation: in domain `pre`, of all of them.
        partial: attention to the rows of one block.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, and the log-sum-exp of each query head's
        logits, [batch_size, seq_len, num_heads].
    """
    layout = parameters.layout
    widths = [group.v_rank for group in layout.groups for _ in range(layout.group_size * parameters.heads_per_kv)]
    if layout.domain == "post" and query.dim() == 4:
        query = _projected(query, parameters)
    outputs, log_sums = [], []
    for block in layer.blocks:
        own_mask = layer.mask_of(block, mask)
        output, log_sum = _block_attention(parameters, block, query, own_mask, key_rotation, partial)
        outputs.append(_whole(output, block, sum(widths)))
        log_sums.append(log_sum)
    found, log_sum = (outputs[0], log_sums[0]) if len(outputs) == 1 else join(outputs, log_sums, widths)
    return found.to(query.dtype), log_sum


def _projected(query: Tensor, parameters: AttentionParameters) -> Tensor:
    """Queries of domain `post` [batch_size, num_heads, seq_len, head_dim] as those of `none` come, for all columns."""
    assert parameters.query_basis is not None
    tokens = query.transpose(1, 2).flatten(0, 1)
    basis = parameters.query_basis.to(query.dtype)
    packed = project_queries(tokens, basis, parameters.layout, parameters.heads_per_kv)
    return packed.unflatten(0, (query.shape[0], -1))


def _whole(output: Tensor, block: Block, width: int) -> Tensor:
    """A block's output in all columns of the layer, [..., width]: what is cut is 0, or of codes their mean."""
    reading, output = block.rows.value_reading, output.to(torch.promote_types(output.dtype, torch.float32))
    if reading is None and output.shape[-1] == width:
        return output
    if reading is None:
        return output.new_zeros(*output.shape[:-1], width).index_copy_(-1, block.rows.output, output)
    whole = reading.offset.to(output.dtype).expand(*output.shape[:-1], width).contiguous()
    return whole.index_add_(-1, block.rows.output, output * reading.factor.to(output.dtype))


def _block_attention(
    parameters: AttentionParameters,
    block: Block,
    query: Tensor,
    mask: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None,
    partial: Partial,
) -> tuple[Tensor, Tensor]:
    rows, own = block.rows, replace(parameters, layout=block.rows.layout)
    if parameters.layout.domain == "pre":
        assert key_rotation is not None
        if block.places is not None:
            places = block.places.clamp(min=0).unsqueeze(1)
            key_rotation = key_rotation[0][places], key_rotation[1][places]
        own = _rebuilding(own, parameters.layout, rows)
        return partial(query, block.key, block.value, own, key_rotation, mask)
    of_block = query if query.shape[-1] == len(rows.query) else query[..., rows.query]
    if rows.query_reading is not None:
        of_block = of_block * rows.query_reading.factor.to(query.dtype)
    output, log_sum = partial(of_block, block.key, block.value, own, None, mask)
    if rows.query_reading is None or parameters.softcap is not None:
        return output, log_sum  # under a soft cap codes are read without a constant: a mean is 0
    shift = query.to(log_sum.dtype) * rows.query_reading.offset
    return output, log_sum + parameters.scaling * _by_head(shift, parameters)


def _rebuilding(own: AttentionParameters, whole: LayerLayout, rows: TierRows) -> AttentionParameters:
    """What rebuilds keys of domain `pre` from a block's rows: of `own`, whose basis and constant are the layer's."""
    basis, reading = own.query_basis, rows.key_reading
    assert basis is not None
    if len(rows.basis) == whole.qk_width and reading is None:
        return own
    kept = basis[:, rows.basis]
    if reading is None:
        return replace(own, query_basis=kept)
    groups = (basis.float() * reading.offset).split([group.qk_rank for group in whole.groups], dim=1)
    added = torch.stack([group.sum(1) for group in groups]).view(len(groups) * whole.group_size, -1)
    constant = added if own.constant_key is None else own.constant_key + added
    return replace(own, query_basis=kept * reading.factor.to(kept.dtype), constant_key=constant)


def _by_head(packed: Tensor, parameters: AttentionParameters) -> Tensor:
    """Sums over the columns of each query head: [..., sum over query heads of qk_rank] -> [..., num_heads]."""
    heads = parameters.layout.group_size * parameters.heads_per_kv
    parts = packed.split([heads * group.qk_rank for group in parameters.layout.groups], dim=-1)
    return torch.cat([part.unflatten(-1, (heads, -1)).sum(-1) for part in parts], dim=-1)
