"""Attention of a compressed layer whose cache is kept by a policy: store, attend to what is held, say what it drew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.parameters import AttentionParameters, seq_len_of
from .cache.evicting_layer import EvictingLayer
from .cache.layer import PolicyLayer
from .cache.spans import spans_of
from .cache.tiered_layer import TieredLayer
from .column_sums import column_sums
from .rope import Rotations
from .rotary_table import rows_of
from .tiered_attention import attend_to_tiers

if TYPE_CHECKING:
    from .attention import RotorAttention


def in_pytorch(layer: PolicyLayer | None) -> bool:
    """Whether attention to what the layer holds runs in plain PyTorch, whatever the device."""
    return isinstance(layer, (TieredLayer, EvictingLayer))


def attend_by_policy(
    module: RotorAttention,
    layer: PolicyLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    mask: Tensor | None,
    rotations: Rotations,
    dropout: float,
    kernels: bool,
) -> Tensor:
    """Store the rows of new tokens as the policy does, and let the queries attend to what it holds.

    Args:
        layer: of `cache`, which is transformers'.
        query, key, value: as in `reference.attention`, of the new tokens.
        mask, rotations: over all tokens so far.
        kernels: queries come as the Triton kernels take them, and these run.
    """
    layer.begin(mask, value.shape[0], seq_len_of(query), query.device)
    parameters = module.parameters_of_attention()
    if isinstance(layer, TieredLayer):
        layer.follow(module.layout, module.shape.heads_per_kv, query.dtype)
        cache.update(key, value, module.layer_idx)
        output, log_sums = attend_to_tiers(parameters, layer, query, mask, rotations.read)
        layer.finish_step(log_sums)
        return output
    if not isinstance(layer, EvictingLayer):
        key, value = cache.update(key, value, module.layer_idx)
        return module.attend(query, key, value, mask, rotations, dropout, kernels)
    if layer.spans is None:
        layer.spans = spans_of(module.layout, query.element_size())
    mask = layer.visible(mask, _groups_of_heads(parameters), None)
    if rotations.read is not None:
        assert layer.positions is not None
        rotations = rotations._replace(read=rows_of(rotations.read, layer.positions.clamp(min=0).long()))
    key, value = cache.update(key, value, module.layer_idx)
    softening = layer.softening()
    output = module.attend(query, key, value, mask, rotations, dropout)
    sums = None
    if softening is not None:
        sums = column_sums(query, key, parameters, rotations.read, mask, softening, layer.newest)
    layer.finish(sums)
    return output


def _groups_of_heads(parameters: AttentionParameters) -> Tensor:
    """[num_heads], the group of each query head, heads in the model's order."""
    groups = parameters.layout.groups
    of_kv_head = {head: index for index, group in enumerate(groups) for head in group.kv_heads}
    of_each = torch.tensor([of_kv_head[head] for head in range(len(of_kv_head))])
    return of_each.repeat_interleave(parameters.shape.heads_per_kv)
