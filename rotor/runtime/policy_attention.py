"""Attention of a compressed layer whose cache is kept by a policy: store, attend to what is held, say what it drew."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..format.layout import LayerLayout
from ..kernels.code_reference import partial_attention
from ..kernels.scores.column_sums import column_sums
from .cache.evicting_layer import EvictingLayer
from .cache.layer import PolicyLayer
from .cache.spans import spans_of
from .cache.tiered_layer import TieredLayer
from .tiered_attention import attend_to_tiers, tiers_fit_kernels

if TYPE_CHECKING:
    from .attention import RotorAttention

Rotation = tuple[Tensor, Tensor] | None
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Rotation], Tensor]
"""(query, key, value, mask, key rotation) -> the output of attention as where no policy is."""


def in_pytorch(layer: PolicyLayer | None, module: RotorAttention, hidden_states: Tensor) -> bool:
    """Whether attention to what the layer holds runs in plain PyTorch, whatever the device."""
    if isinstance(layer, TieredLayer):
        return not tiers_fit_kernels(layer.policy, module, hidden_states.dtype, hidden_states.device)
    return isinstance(layer, EvictingLayer)


def attend_by_policy(
    module: RotorAttention,
    layer: PolicyLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    mask: Tensor | None,
    key_rotation: Rotation,
    attend: Attend,
    dropout: float,
    use_kernels: bool,
) -> Tensor:
    """Store the rows of new tokens as the policy does, and let the queries attend to what it holds.

    Args:
        layer: of `cache`, which is transformers'.
        query, key, value: as in `grouped_attention`, of the new tokens.
        mask: over all tokens so far. key_rotation: in domain `pre`, of all of them.
        use_kernels: queries come as the Triton kernels take them, and these run.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank].
    """
    seq_len = value.shape[2]
    layer.begin(mask, value.shape[0], seq_len, query.device)
    if isinstance(layer, TieredLayer):
        layer.follow(module.layout, module.heads_per_kv, query.dtype)
        cache.update(key, value, module.layer_idx)
        partial = partial_attention
        if use_kernels:
            from ..kernels.attention import packed_partial_attention  # imports Triton

            def partial(query: Tensor, key: Tensor, value: Tensor, own: Any, _: Rotation, mask: Any) -> Any:
                return packed_partial_attention(query, key, value, own, module.head_dim, mask)

        parameters = module.parameters_of_attention()
        output, log_sums = attend_to_tiers(parameters, layer, query, mask, key_rotation, partial)
        layer.finish_step(log_sums)
        return output
    if not isinstance(layer, EvictingLayer):
        key, value = cache.update(key, value, module.layer_idx)
        return attend(query, key, value, mask, key_rotation)
    if layer.spans is None:
        layer.spans = spans_of(module.layout, query.element_size())
    mask = layer.visible(mask, _groups_of_heads(module.layout, module.heads_per_kv), None)
    if key_rotation is not None:
        assert layer.positions is not None
        places = layer.positions.clamp(min=0).long()
        key_rotation = key_rotation[0][places], key_rotation[1][places]
    key, value = cache.update(key, value, module.layer_idx)
    scored, parameters = layer.softening(), module.parameters_of_attention()
    if scored is None:
        output = attend(query, key, value, mask, key_rotation)
        layer.finish(None)
        return output
    of_queries = None
    if scored.none and seq_len > 1 and not dropout:
        # Attention's own log-sum-exp is what sums of its columns need.
        wide, of_queries = partial_attention(query, key, value, parameters, key_rotation, mask)
        output = wide.to(query.dtype)
    else:
        output = attend(query, key, value, mask, key_rotation)
    layer.finish(column_sums(query, key, parameters, key_rotation, mask, of_queries, scored, layer.newest))
    return output


def _groups_of_heads(layout: LayerLayout, heads_per_kv: int) -> Tensor:
    """[num_heads], the group of each query head, heads in the model's order."""
    of_kv_head = {head: index for index, group in enumerate(layout.groups) for head in group.kv_heads}
    return torch.tensor([of_kv_head[head] for head in range(len(of_kv_head))]).repeat_interleave(heads_per_kv)
