"""The form that every layer is compressed to, by a recipe, and the moments that it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...checkpoint.layout import POST_ROPE, AttentionShape, KeyForm, LayerForm, pre_rope
from ...errors import RecipeError
from ...recipe import Recipe
from ..bases.moments import latent_names

Frequencies = Sequence[Sequence[float]]
"""Radians by which each plane rotates from one position to the next, of each kind of layer."""


def layer_form(recipe: Recipe, shape: AttentionShape, frequencies: Frequencies | None) -> LayerForm:
    """The form of every layer of a model.

    Args:
        frequencies: of RoPE; None where they depend on the length of a sequence: what is stored rotated within blocks
            would be rotated by others than what comes later, so that `block` is then `post`.
    Raises:
        RecipeError: the group size does not divide the KV heads; more fast planes than a head has.
    """
    keys = _key_form(recipe, shape, frequencies)
    # Slow planes hardly rotate within a block, so that keys are as linear in the hidden state as values are.
    form = LayerForm(keys, 1, recipe.joins_latents and (keys.rope_block is not None or not shape.rotary_dim))
    return form._replace(group_size=_group_size(recipe, shape, form))


def wanted_gradients(form: LayerForm) -> frozenset[str]:
    """Names of what gradients are taken by where a recipe needs any."""
    return frozenset(latent_names(form.keys, form.joint))


def _key_form(recipe: Recipe, shape: AttentionShape, frequencies: Frequencies | None) -> KeyForm:
    groups, planes = recipe.groups, shape.rotary_planes
    if not shape.rotary_dim or groups.domain == "post":
        return POST_ROPE
    if groups.domain == "pre" or groups.fast_planes == "all":
        return pre_rope(shape)
    if frequencies is None:
        return POST_ROPE
    if groups.fast_planes == "quarter":
        # Those that rotate by a quarter turn or more within a block, in the kind of layer that has most of them.
        count = max(sum(step * groups.rope_block >= math.pi / 2 for step in of_kind) for of_kind in frequencies)
    else:
        count = groups.fast_planes
    if count > planes:
        raise RecipeError(
            f"groups.fast_planes {count}: RoPE rotates {planes} planes of a head of this model.",
            f"Give a number up to {planes}, quarter or all.",
        )
    return pre_rope(shape) if count == planes else KeyForm(groups.rope_block, count)


def _group_size(recipe: Recipe, shape: AttentionShape, form: LayerForm) -> int:
    heads = shape.num_kv_heads
    if recipe.groups.size == "auto":
        from ..prediction.cost import DecodeStep
        from ..prediction.decode_times import largest_fast_group
        from ..prediction.devices import find_device

        load = recipe.objective
        device, step = find_device(load.device), DecodeStep(load.context_tokens, load.batch_size)
        return largest_fast_group(shape, form, recipe.coded, device, step)
    size = heads if recipe.groups.size == "all" else recipe.groups.size
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads.", "Choose a divisor, all or auto."
        )
    return size
