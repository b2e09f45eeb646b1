"""Derive from a recipe the candidates (form of keys, group size) of a layer, and the moments that they read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..bases.layer import needed_statistics
from ..bases.moments import stored_name
from ..errors import RecipeError
from ..format.layout import POST_ROPE, AttentionShape, Candidate, KeyForm, pre_rope
from ..recipe import Recipe

Candidates = dict[str, Candidate]
"""The candidates by key (`pre-8`); the same for every layer."""

Frequencies = Sequence[Sequence[float]]
"""Radians by which each plane turns from one position to the next, of each kind of layer."""

FAST_PLANES_STEP = 8
"""Of what `groups.fast_planes: auto` chooses among."""


def candidates_of(recipe: Recipe, shape: AttentionShape, frequencies: Frequencies | None) -> Candidates:
    """List the candidates that the ranks choose among for each layer, the first the widest.

    Args:
        frequencies: of RoPE; None where they depend on the length of a sequence: what is stored rotated within blocks
            would be rotated by others than what comes later, so that `block` is then `post`.
    Raises:
        RecipeError: the group size does not divide the KV heads; more fast planes than a head has.
    """
    found = {}
    for form in _forms(recipe, shape, frequencies):
        # Slow planes hardly turn within a block, so that keys are as linear in the hidden state as values are.
        joint = recipe.joins_latents and (form.rope_block is not None or not shape.rotary_dim)
        kind = Candidate(form, 1, joint)
        for size in _group_sizes(recipe, shape, kind):
            found[f"{_form_key(form, shape)}-{size}"] = kind._replace(group_size=size)
    return found


def wanted_moments(recipe: Recipe, candidates: Candidates) -> frozenset[str]:
    """Names of the moments that the recipe's methods read for these candidates."""
    bases = recipe.bases
    return frozenset().union(
        *(needed_statistics(bases.qk, bases.vo, c.form, bases.refit, c.joint) for c in candidates.values())
    )


def wanted_gradients(candidates: Candidates) -> frozenset[str]:
    """Names of what gradients are taken by where a recipe needs any."""
    apart = {"value"} if any(not candidate.joint for candidate in candidates.values()) else set()
    return frozenset(apart | {stored_name(candidate.form, candidate.joint) for candidate in candidates.values()})


def _form_key(form: KeyForm, shape: AttentionShape) -> str:
    if not shape.rotary_dim:
        return "none"
    if form.rope_block is None:
        return "post"
    return "pre" if form.fast_planes == shape.rotary_planes else f"{form.rope_block}_{form.fast_planes}"


def _forms(recipe: Recipe, shape: AttentionShape, frequencies: Frequencies | None) -> list[KeyForm]:
    groups, planes = recipe.groups, shape.rotary_planes
    if not shape.rotary_dim or groups.domain == "post":
        return [POST_ROPE]
    if groups.domain != "block":
        return [pre_rope(shape)] if groups.domain == "pre" else [pre_rope(shape), POST_ROPE]
    if groups.fast_planes == "all":
        return [pre_rope(shape)]
    if frequencies is None:
        return [POST_ROPE]
    if groups.fast_planes == "auto":
        counts = [*range(0, planes, FAST_PLANES_STEP), planes][::-1]
    elif groups.fast_planes == "quarter":
        # Those that turn by a quarter turn or more within a block, in the kind of layer that has most of them.
        counts = [max(sum(step * groups.rope_block >= math.pi / 2 for step in of_kind) for of_kind in frequencies)]
    else:
        counts = [groups.fast_planes]
    if max(counts) > planes:
        raise RecipeError(
            f"groups.fast_planes {max(counts)}: RoPE rotates {planes} planes of a head of this model.",
            f"Give a number up to {planes}, quarter, all or auto.",
        )
    return [pre_rope(shape) if count == planes else KeyForm(groups.rope_block, count) for count in counts]


def _group_sizes(recipe: Recipe, shape: AttentionShape, kind: Candidate) -> list[int]:
    heads = shape.num_kv_heads
    if recipe.groups.size == "any":
        return [size for size in range(heads, 0, -1) if heads % size == 0]
    if recipe.groups.size == "auto":
        from ..prediction.cost import DecodeStep
        from ..prediction.decode_times import largest_fast_group
        from ..prediction.devices import find_device

        load = recipe.objective
        device, step = find_device(load.device, load.device_file), DecodeStep(load.context_tokens, load.batch_size)
        return [largest_fast_group(shape, kind, recipe.coded, device, step)]
    size = heads if recipe.groups.size == "all" else int(recipe.groups.size)
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads.", "Choose a divisor, all, auto or any."
        )
    return [size]
