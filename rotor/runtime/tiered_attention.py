"""Attention to a cache in tiers: each block of rows by itself, joined by its log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..kernels.code_reference import partial_attention
from ..kernels.joining import join
from ..kernels.parameters import AttentionParameters
from .cache.tiered_layer import Block, TieredLayer


def attend_to_tiers(
    parameters: AttentionParameters,
    layer: TieredLayer,
    query: Tensor,
    mask: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Attention to all blocks that a layer holds.

    Args:
        parameters: of the layer, whole.
        query, mask: as in `grouped_attention`, over all tokens so far. key_rotation: in domain `pre`, of all of them.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, and the log-sum-exp of each query head's
        logits, [batch_size, seq_len, num_heads].
    """
    layout = parameters.layout
    widths = [group.v_rank for group in layout.groups for _ in range(layout.group_size * parameters.heads_per_kv)]
    outputs, log_sums = [], []
    for block in layer.blocks:
        output, log_sum = _block_attention(parameters, block, query, layer.mask_of(block, mask), key_rotation)
        if output.shape[-1] < sum(widths):
            whole = output.new_zeros(*output.shape[:-1], sum(widths))
            whole[..., block.rows.output.to(output.device)] = output
            output = whole
        outputs.append(output)
        log_sums.append(log_sum)
    found, log_sum = (outputs[0], log_sums[0]) if len(outputs) == 1 else join(outputs, log_sums, widths)
    return found.to(query.dtype), log_sum


def _block_attention(
    parameters: AttentionParameters,
    block: Block,
    query: Tensor,
    mask: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    rows, basis = block.rows, parameters.query_basis
    cut = rows.layout.qk_width < parameters.layout.qk_width
    if cut and basis is not None:
        basis = basis[:, rows.basis.to(basis.device)]
    elif cut:
        query = query[..., rows.query.to(query.device)]
    if key_rotation is not None and block.places is not None:
        places = block.places.clamp(min=0).unsqueeze(1)
        key_rotation = key_rotation[0][places], key_rotation[1][places]
    own = replace(parameters, layout=rows.layout, query_basis=basis)
    return partial_attention(query, block.key, block.value, own, key_rotation, mask)
