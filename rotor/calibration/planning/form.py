"""Derive the form that a recipe compresses the layers of a model to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...checkpoint.layout import POST_ROPE, AttentionShape, KeyForm, LayerForm, ModelForm, pre_rope
from ...errors import RecipeError
from ...recipe import Recipe
from ..bases.moments import vector_names

KERNEL_PLANES = 16
"""Fast planes that kernels rebuild together: a few more than a multiple cost as much as the next one. Below one they
are padded to it."""

Frequencies = Sequence[Sequence[float]]
"""Radians by which each plane of each layer rotates from one position to the next."""


def model_form(recipe: Recipe, shape: AttentionShape, frequencies: Frequencies | None) -> ModelForm:
    """Derive the form of every layer of a model.

    Args:
        frequencies: frequencies of RoPE; None if they depend on the length of a sequence. Keys stored earlier would
            then be rotated within their blocks by other frequencies than later ones, so `block` becomes `post`; so it
            does where the model needs that.
    Raises:
        RecipeError: the group size does not divide the KV heads; more fast planes than a head has; keys before RoPE
            where they cannot be; nothing is kept exactly where that is needed.
    """
    if shape.needs_exact and recipe.exact.tokens is None:
        raise RecipeError(
            f"exact.newest 0: this model needs exact tokens: {shape.needs_exact}.", "Give --set exact.newest=128."
        )
    by_layer = [None] * shape.num_layers if frequencies is None else frequencies
    keys = tuple(_key_form(recipe, shape.layer(layer), own) for layer, own in enumerate(by_layer))
    rotated = [form for layer, form in enumerate(keys) if layer not in shape.without_rope]
    # slowest to decode, as rebuilding planes takes arithmetic
    slowest = max(rotated, key=lambda form: form.fast_planes)
    # Slow planes hardly rotate within a block, so keys are about as linear in the hidden state as values.
    joint = recipe.joins_latents and (slowest.rope_block is not None or not shape.rotates)
    return ModelForm(keys, _group_size(recipe, shape, LayerForm(slowest, 1, joint)), joint)


def wanted_gradients(form: LayerForm) -> frozenset[str]:
    """Names of the keys and values whose gradients are needed, if a recipe needs gradients."""
    return frozenset(vector_names(form))


def _key_form(recipe: Recipe, shape: AttentionShape, frequencies: Sequence[float] | None) -> KeyForm:
    """Derive how a layer's keys are stored from the frequencies of its RoPE."""
    groups, planes = recipe.groups, shape.rotary_planes
    if not shape.rotary_dim or groups.domain == "post" or (shape.needs_post_rope and groups.domain == "block"):
        return POST_ROPE
    if shape.needs_post_rope:
        raise RecipeError(
            f"groups.domain {groups.domain}: {shape.needs_post_rope}, and keys stored before RoPE are rotated by their "
            "place in the cache.",
            "Give --set groups.domain=post.",
        )
    if groups.domain == "pre" or groups.fast_planes == "all":
        return pre_rope(shape)
    if frequencies is None:
        return POST_ROPE
    if groups.fast_planes == "quarter":
        count = sum(frequency * groups.rope_block >= math.pi / 2 for frequency in frequencies)
        if count > KERNEL_PLANES and count < planes:
            count -= count % KERNEL_PLANES
    else:
        count = groups.fast_planes
    if count > planes:
        raise RecipeError(
            f"groups.fast_planes {count}: RoPE rotates {planes} planes of a head of this model.",
            f"Give a number up to {planes}, quarter or all.",
        )
    return pre_rope(shape) if count == planes else KeyForm(groups.rope_block, count)


def _group_size(recipe: Recipe, shape: AttentionShape, form: LayerForm) -> int:
    heads = shape.shared_kv_heads
    if recipe.groups.size == "auto":
        from ..prediction.cost import DecodeStep
        from ..prediction.decode_times import best_group_size
        from ..prediction.devices import find_device

        load = recipe.objective
        device = find_device(load.device)
        step = DecodeStep(load.context_tokens, load.batch_size)
        return best_group_size(shape, form, recipe.coded, device, step)
    size = heads if recipe.groups.size == "all" else recipe.groups.size
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads"
            f"{', all that divide those of every layer' if shape.heads else ''}.",
            "Choose a divisor, all or auto.",
        )
    return size
