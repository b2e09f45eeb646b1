"""Attention to a cache in tiers: each block of rows by itself, joined by its log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..kernels.joining import join
from ..kernels.parameters import AttentionParameters
from ..kernels.reference import partial_attention
from ..kernels.rotary import Rotation
from .cache.tiered_layer import Block, TieredLayer
from .rotary_table import rows_of


def attend_to_tiers(
    parameters: AttentionParameters,
    layer: TieredLayer,
    query: Tensor,
    mask: Tensor | None,
    key_rotation: Rotation | None,
) -> tuple[Tensor, Tensor]:
    """Attention to all blocks that a layer holds.

    Args:
        parameters: of the layer, whole.
        query, mask, key_rotation: as in `reference.attention`, over all tokens so far.
    Returns:
        [batch_size, seq_len, sum over query heads of value width] in query's dtype, and the log-sum-exp of each query
        head's logits, [batch_size, seq_len, num_heads].
    """
    widths = [group.values.width for group in parameters.layout.groups for _ in range(parameters.heads_per_group)]
    outputs, log_sums = [], []
    for block in layer.blocks:
        output, log_sum = _block_attention(parameters, block, query, layer.mask_of(block, mask), key_rotation)
        if output.shape[-1] < sum(widths):  # what is cut is 0
            whole = output.new_zeros(*output.shape[:-1], sum(widths))
            output = whole.index_copy_(-1, block.rows.output, output)
        outputs.append(output)
        log_sums.append(log_sum)
    found, log_sum = (outputs[0], log_sums[0]) if len(outputs) == 1 else join(outputs, log_sums, widths)
    return found.to(query.dtype), log_sum


def _block_attention(
    parameters: AttentionParameters, block: Block, query: Tensor, mask: Tensor | None, key_rotation: Rotation | None
) -> tuple[Tensor, Tensor]:
    rows, basis = block.rows, parameters.query_basis
    if basis is None:
        query = query[..., rows.query]
    else:
        basis = basis[:, rows.basis]
    own = replace(parameters, layout=rows.layout, query_basis=basis)
    if key_rotation is not None and block.places is not None:
        key_rotation = rows_of(key_rotation, block.places.clamp(min=0).unsqueeze(1))
    return partial_attention(query, block.key, block.value, own, key_rotation, mask)
