"""Observe queries, keys and values inside attention while a model runs, and sum their second moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..checkpoint.families import Family
from ..checkpoint.layout import PRE_ROPE, AttentionShape, ExactTokens, KeyForm
from ..checkpoint.projections import keys_before_rope, split_activations
from ..kernels.reference.attention import dense_attention
from ..kernels.rotary import Rotation, rotate, within_blocks
from ..models.layerwise import LayerwiseModel, activation_bytes
from ..progress import Advance
from ..recipe.sections import Prune
from .moments import CHUNK_BYTES, JOINT, LayerStatistics, named_form
from .pruning import ClusteredStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Observer = Callable[[int, dict[str, Tensor]], None]
"""Function of the layer index and the activations of one batch: `query` [tokens, num_heads, head_dim]; `value` and keys
[tokens, num_kv_heads, head_dim]; joint keys and values [tokens, num_kv_heads, 2 head_dim]; `output` [tokens, num_heads,
group_size * head_dim], the group's stacked values averaged with each query head's attention weights."""

OBSERVED_ATTENTION = "rotor_observed"
"""Name of the observed attention in transformers' attention interface."""

EXACT_SHARE = 0.1
"""Share of the gradients by exact keys and values that counts: few late queries read a token from codes, and caches
that keep no token exactly read codes as well. See artifacts/NOTES.md, 2026-11-27."""

AttentionFunction = Callable[..., tuple[Tensor, None]]


def layer_statistics(
    network: LayerwiseModel,
    layer: int,
    sequences: Tensor,
    states: Tensor,
    out: Tensor,
    group_size: int,
    wanted: frozenset[str],
    prune: Prune | None = None,
    advance: Advance = lambda done: None,
) -> LayerStatistics:
    """Put hidden states through a layer and sum the second moments of what its attention sees, on the CPU.

    Args:
        sequences: [num_sequences, seq_len] tokens. states, out: [num_sequences, seq_len, hidden_size], the states that
            enter the layer and a buffer for those that leave it.
        wanted: names of the moments (see LayerStatistics).
        prune: with `kmeans`, moments are those of centroids.
    """
    shape = network.shape.layer(layer)
    statistics = LayerStatistics(shape, group_size)
    if prune is not None and prune.kmeans is not None:
        statistics = ClusteredStatistics(shape, group_size, prune=prune, layer=layer)

    def observe(index: int, activations: dict[str, Tensor]) -> None:
        if index == layer:
            statistics.add(activations)

    observed = capture(network.model, network.family, network.shape, group_size, wanted, observe)
    turn = network.turn_of(layer)
    with torch.inference_mode(), network.layer(turn), observed:
        network.run(turn, sequences, states, out, advance)
    if turn != layer:
        out.copy_(states)
    return statistics.finish()


def capture_bytes(
    shape: AttentionShape,
    config: PreTrainedConfig,
    tokens: int,
    group_size: int,
    element_bytes: int,
    moments: frozenset[str],
) -> int:
    """Memory of `layer_statistics` while a batch of `tokens` tokens runs through a layer, beside the sums.

    Outputs of a group's stacked values are copied; what is added to sums is copied to float64 in chunks.
    """
    outputs = 2 * shape.query_width * group_size if "output" in moments and group_size > 1 else 0
    chunk = min(CHUNK_BYTES, tokens * shape.query_width * group_size * 8)
    copies = max(chunk, tokens * shape.heads_per_kv * shape.head_dim * 8)  # at least one head
    return activation_bytes(shape, config, tokens, element_bytes, outputs) + 2 * copies


@contextmanager
def capture(
    model: PreTrainedModel,
    family: Family,
    shape: AttentionShape,
    group_size: int,
    wanted: frozenset[str],
    observe: Observer,
) -> Iterator[None]:
    """Context in which every forward pass of `model` reports the `wanted` activations of each layer to `observe`.

    Run the model with use_cache=False and without padding.
    """
    stored = StoredKeys(model, family, shape)

    def report(layer: int, tensors: dict[str, Tensor], output: Tensor) -> None:
        activations: dict[str, Tensor] = {}
        if "value" in tensors:
            activations = stored.of(sorted(wanted - {"query", "output"}), layer, output.shape[1], tensors)
        if "query" in wanted:
            activations["query"] = stored.queries(wanted, layer, tensors["query"].transpose(1, 2).flatten(0, 1))
        if "output" in wanted:
            activations["output"] = output.flatten(0, 1)
        observe(layer, activations)

    layers = range(shape.num_layers)
    with observed_attention(model, family, shape, layers, report, group_size if "output" in wanted else 1):
        yield


@contextmanager
def observed_attention(
    model: PreTrainedModel,
    family: Family,
    shape: AttentionShape,
    layers: range,
    report: Callable[[int, dict[str, Tensor], Tensor], None] = lambda layer, tensors, output: None,
    group_size: int = 1,
    exact: Sequence[ExactTokens] | None = None,
) -> Iterator[None]:
    """Context in which the attention of some layers reports the tensors that it computes with, graph included.

    Queries, keys after RoPE and values come from transformers' attention interface. Keys before RoPE come from a hook
    on the key projection, or on the key norm if there is one before RoPE. A family that bypasses the interface gets a
    forward that calls it.

    Args:
        report: is called with the layer; with `query`, `key_post` and `value`, [batch_size, heads, seq_len, head_dim],
            and with RoPE also `key_pre` in the shape of its module's output, unless norms stand behind it; and with the
            output, [batch_size, seq_len, num_heads, group_size * head_dim], each query head's average of the stacked
            values of its KV head's group. A layer that reads the cache of another is reported as that one, without
            keys and values.
        exact: tokens of each layer that queries read exactly. Reported `key_post` and `value` are then copies in the
            graph, which get the gradient of queries that read a token from codes, and EXACT_SHARE of that of the
            others; `key_pre` is not reported.
    """
    before: dict[int, Tensor] = {}
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    modules = {layer: family.attention_module(model, layer) for layer in layers}
    layer_of = {position: layer for layer, position in enumerate(family.placed)}
    source_of = {position: layer_of[source] for position, source in family.readers}

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        reads = module.layer_idx in source_of
        layer = source_of[module.layer_idx] if reads else layer_of[module.layer_idx]
        layer_shape = shape.layer(layer)
        query, key = (family.in_halves(side, layer_shape) for side in (query, key))
        tensors = {"query": query, "key_post": key, "value": value}
        if layer in before:
            tensors["key_pre"] = before.pop(layer)
        if exact is not None:
            if not reads:
                copies[layer] = key.view_as(key), value.view_as(value)
                tensors = {"query": query, "key_post": copies[layer][0], "value": copies[layer][1]}
            coded_key, coded_value = copies[layer]
            # The exact ones are the same numbers, of whose gradient the copies get a part.
            key, value = torch.lerp(key, coded_key, EXACT_SHARE), torch.lerp(value, coded_value, EXACT_SHARE)
            key, value = torch.cat([key, coded_key], dim=2), torch.cat([value, coded_value], dim=2)
            attention_mask = exact_then_coded(attention_mask, query.shape[2], exact[layer], query.device)
        output = dense_attention(query, key, _stacked(value, group_size), scaling, attention_mask, softcap, s_aux)
        output = output.unflatten(-1, (layer_shape.num_heads, -1))
        report(layer, {"query": query} if reads else tensors, output)
        return _block_of_head(output, layer_shape, group_size), None

    def keep(layer: int) -> Callable[..., Tensor]:
        def scaled(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
            before[layer] = output if family.key_factor == 1.0 else output * family.key_factor
            return output if family.key_factor == 1.0 else before[layer] / family.key_factor

        return scaled

    handles: list[RemovableHandle] = []
    if family.rotary is not None and family.norms_behind_rope is None:
        for layer, module in modules.items():
            if not shape.layer(layer).rotary_dim:
                continue
            handles.append(module.get_submodule(family.key_source).register_forward_hook(keep(layer)))
    from transformers import AttentionInterface, AttentionMaskInterface  # these import the models of transformers
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(OBSERVED_ATTENTION, attention)
    AttentionMaskInterface.register(OBSERVED_ATTENTION, sdpa_mask)  # otherwise transformers drops the mask silently
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    config._attn_implementation = OBSERVED_ATTENTION
    replaced = modules if family.bypasses_interface else {}
    for layer, module in replaced.items():
        module.forward = partial(_forward_through_interface, module, family, shape.layer(layer), attention)
    try:
        yield
    finally:
        for module in replaced.values():
            del module.forward
        config._attn_implementation = implementation
        for handle in handles:
            handle.remove()


def exact_then_coded(
    mask: Tensor | None, seq_len: int, exact: ExactTokens, device: torch.device | None = None
) -> Tensor:
    """The mask of keys of whole sequences, given twice: as exact ones, then as those that are read from codes.

    Args:
        mask: [batch_size or 1, heads or 1, seq_len, seq_len], bool (True: attend) or added to the logits; None is
            causal.
    Returns:
        [..., seq_len, 2 seq_len], of the same kind.
    """
    index = torch.arange(seq_len, device=device)
    age = index[:, None] - index
    is_exact = exact.is_exact(index[:, None], index)
    mask = (age >= 0)[None, None] if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.cat([mask & is_exact, mask & ~is_exact], dim=-1)
    return torch.cat([mask.masked_fill(~is_exact, -torch.inf), mask.masked_fill(is_exact, -torch.inf)], dim=-1)


def _forward_through_interface(
    module: nn.Module,
    family: Family,
    shape: AttentionShape,
    attention: AttentionFunction,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Forward of a fused attention with RoPE that calls the attention interface."""
    assert family.fused is not None
    fused = module.get_submodule(family.fused)(hidden_states)
    query, key, value = (
        part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for part in split_activations(family, fused, shape)
    )
    assert position_embeddings is not None
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)
    output, _ = attention(module, rotate(query, cos, sin), rotate(key, cos, sin), value, attention_mask)
    return module.get_submodule(family.output)(output.flatten(2)), None


def _stacked(value: Tensor, group_size: int) -> Tensor:
    """Stack the values of each head's whole group: [batch_size, num_kv_heads, seq_len, d] -> [..., group_size * d]."""
    if group_size == 1:
        return value
    groups = value.unflatten(1, (-1, group_size)).transpose(2, 3).flatten(3)
    return groups.repeat_interleave(group_size, dim=1)


def _block_of_head(output: Tensor, shape: AttentionShape, group_size: int) -> Tensor:
    """Take from [batch_size, seq_len, num_heads, group_size * d] the part of each query head's KV head, [..., d]."""
    if group_size == 1:
        return output
    heads = torch.arange(shape.num_heads, device=output.device)
    index_in_group = heads // shape.heads_per_kv % group_size
    return output.unflatten(-1, (group_size, -1))[:, :, heads, index_in_group]


class StoredKeys:
    """Converts keys and values that attention sees to the form in which they are stored, and their gradients."""

    def __init__(self, model: PreTrainedModel, family: Family, shape: AttentionShape) -> None:
        self.model, self.family, self.shape = model, family, shape

    def of(
        self, names: Iterable[str], layer: int, seq_len: int, observed: dict[str, Tensor], gradients: bool = False
    ) -> dict[str, Tensor]:
        """Stored keys and values by the names of their moments.

        Args:
            names: `value`, or names from `stored_name`.
            observed: `key_post`, `value` and perhaps `key_pre`, as `observed_attention` reports them.
            gradients: these are gradients, which become those of what is stored.
        Returns:
            Each [tokens, num_kv_heads, head_dim]; joint ones are twice as wide, with each head's key before its value.
        """
        by_token = {name: observed[name].transpose(1, 2).flatten(0, 1) for name in ("key_post", "value")}
        converted = {}
        for name in names:
            form = named_form(name)
            if form is None:
                converted[name] = by_token["value"]
                continue
            keys = by_token["key_post"]
            if form.rope_block is not None:
                if "key_pre" in observed:
                    keys = keys_before_rope(self.family, observed["key_pre"], self.shape.layer(layer))
                else:
                    keys = self._rotated_back(layer, keys, seq_len, gradients)
                keys = self._within_blocks(layer, keys, seq_len, form)
            joint = name.startswith(JOINT)
            converted[name] = torch.cat([keys, by_token["value"].to(keys.dtype)], dim=-1) if joint else keys
        return converted

    def queries(self, names: Iterable[str], layer: int, queries: Tensor) -> Tensor:
        """Queries, [tokens, num_heads, head_dim], as stored keys of these names meet them."""
        weight = self._weight(layer)
        forms = [named_form(name) for name in names]
        in_blocks = any(form is not None and form.rope_block is not None for form in forms)
        return queries if weight is None or not in_blocks else queries * weight.to(queries.dtype)

    def _weight(self, layer: int) -> Tensor | None:
        """Factors of keys behind RoPE, [head_dim]; None where by nothing."""
        if self.family.norms_behind_rope != "weighted":
            return None
        norm = self.family.attention_module(self.model, layer).get_submodule(self.family.norms[-1])
        assert isinstance(norm.weight, Tensor)
        return self.family.in_halves(norm.weight.detach(), self.shape.layer(layer))

    def _rotated_back(self, layer: int, keys: Tensor, seq_len: int, gradients: bool) -> Tensor:
        """Undo RoPE, its attention factor and the weights behind it, in float32 or wider; keys are of whole sequences.

        Of gradients: multiply by the transpose of what keys are multiplied by.
        """
        dtype = torch.promote_types(keys.dtype, torch.float32)
        keys, weight = keys.to(dtype), self._weight(layer)
        if weight is not None:
            weight = weight.to(dtype)
            # What is multiplied by 0 says nothing of what it was.
            keys = keys * (weight if gradients else torch.where(weight == 0.0, 0.0, 1.0 / weight))
        cos, sin = self._rotation(layer, seq_len, keys.device, dtype)
        if not gradients:
            square = cos.square() + sin.square()
            cos, sin = cos / square, sin / square
        return rotate(keys.unflatten(0, (-1, seq_len)), cos[:, None], -sin[:, None]).flatten(0, 1)

    def _within_blocks(self, layer: int, keys: Tensor, seq_len: int, form: KeyForm) -> Tensor:
        """Rotate keys within blocks, in float32 or wider; keys are of whole sequences."""
        if form == PRE_ROPE:
            return keys
        dtype = torch.promote_types(keys.dtype, torch.float32)
        positions = torch.arange(seq_len, device=keys.device)
        cos, sin = within_blocks(self._rotation(layer, seq_len, keys.device, dtype), positions, form)
        rotated = rotate(keys.to(dtype).unflatten(0, (-1, seq_len)), cos[:, None], sin[:, None])
        return rotated.flatten(0, 1)

    def _rotation(self, layer: int, count: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """cos and sin of all `count` positions of a sequence, whose length frequencies may depend on."""
        assert self.family.rotary is not None
        kind = self.family.rotary_type(self.model.config, layer)
        rotary = self.model.get_submodule(self.family.rotary)
        positions = torch.arange(count, device=device)
        like = torch.empty(0, device=device, dtype=dtype)
        cos, sin = self.family.rotation(rotary(like, positions[None], *(() if kind is None else (kind,))))
        return cos[0].to(device), sin[0].to(device)
