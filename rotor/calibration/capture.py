"""Observe queries, keys and values inside attention while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..format.layout import AttentionShape
from ..kernels.reference import attend
from ..kernels.rotary import rotate
from ..models.projections import keys_before_rope, split_activations
from ..runtime.families import Family
from .turning import StoredKeys, reads_before_rope

Observer = Callable[[int, dict[str, Tensor]], None]
"""Called with the layer index and activations of one batch: `query` [tokens, num_heads, head_dim]; `value` and keys
[tokens, num_kv_heads, head_dim]; joint ones [tokens, num_kv_heads, 2 head_dim], keys with their values; `output`
[tokens, num_heads, group_size * head_dim], the group's stacked values averaged with each query head's attention
weights."""

CAPTURE = "rotor_capture"


@contextmanager
def capture(
    model: Any,
    family: Family,
    shape: AttentionShape,
    group_size: int,
    wanted: frozenset[str],
    observe: Observer,
) -> Iterator[None]:
    """While active, every forward pass of `model` reports the `wanted` activations of each layer to `observe`.

    Queries, keys after RoPE and values come from transformers' attention interface; keys before RoPE from a hook on
    the key projection, or on the key norm where there is one. A family that bypasses the interface gets a forward that
    calls it. Run the model with use_cache=False and without padding.
    """
    pending: dict[int, Tensor] = {}
    stored = StoredKeys(model, family, shape)
    reads_before = reads_before_rope(wanted)

    def hook_for(layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            pending[layer] = keys_before_rope(family, output, shape).unflatten(-1, (-1, shape.head_dim))

        return hook

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        by_token = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        keys = pending.pop(layer) if reads_before else None, *by_token[1:]
        activations = {
            name: by_token[0] if name == "query" else stored.of(name, layer, query.shape[2], *keys)
            for name in sorted(wanted - {"output"})
        }
        size = group_size if "output" in wanted else 1
        output = attend(query, key, _stacked(value, size), scaling, attention_mask, softcap=softcap)
        output = output.unflatten(-1, (shape.num_heads, -1))
        if "output" in wanted:
            activations["output"] = output.flatten(0, 1)
        observe(layer, activations)
        return _own_block(output, shape, size), None

    handles: list[Any] = []
    modules = [family.attention_module(model, layer) for layer in range(shape.num_layers)]
    if reads_before:
        for layer, module in enumerate(modules):
            handles.append(module.get_submodule(family.key_source).register_forward_hook(hook_for(layer)))
    try:
        with attention_replaced(CAPTURE, attention, model.config, modules, family, shape):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attention_replaced(
    name: str,
    attention: Callable[..., tuple[Tensor, None]],
    config: Any,
    modules: Sequence[Any],
    family: Family,
    shape: AttentionShape,
) -> Iterator[None]:
    """While active, `attention` serves a model's layers, as transformers' attention interface knows it by `name`.

    Args:
        config: the model's. modules: those of attention that are run; in a family that bypasses the interface they get
            a forward that calls it.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it transformers drops the mask silently
    before = config._attn_implementation
    config._attn_implementation = name
    replaced = modules if family.bypasses_interface else ()
    for module in replaced:
        module.forward = partial(_forward_through_interface, module, family, shape, attention)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward
        config._attn_implementation = before


def _forward_through_interface(
    module: Any,
    family: Family,
    shape: AttentionShape,
    attention: Callable[..., tuple[Tensor, None]],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of a fused attention with RoPE, written with the attention interface."""
    fused = module.get_submodule(family.fused)(hidden_states)
    query, key, value = (
        part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for part in split_activations(family, fused, shape)
    )
    assert position_embeddings is not None
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)
    output, _ = attention(module, rotate(query, cos, sin), rotate(key, cos, sin), value, attention_mask)
    return module.get_submodule(family.output)(output.flatten(2)), None


def _stacked(value: Tensor, group_size: int) -> Tensor:
    """[batch_size, num_kv_heads, seq_len, d] -> the values of each head's whole group, [..., group_size * d]."""
    if group_size == 1:
        return value
    groups = value.unflatten(1, (-1, group_size)).transpose(2, 3).flatten(3)
    return groups.repeat_interleave(group_size, dim=1)


def _own_block(output: Tensor, shape: AttentionShape, group_size: int) -> Tensor:
    """[batch_size, seq_len, num_heads, group_size * d] -> what each query head gets from its own KV head's values."""
    if group_size == 1:
        return output
    heads = torch.arange(shape.num_heads, device=output.device)
    own = heads // shape.heads_per_kv % group_size
    return output.unflatten(-1, (group_size, -1))[:, :, heads, own]
