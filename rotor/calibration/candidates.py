"""Derive from a recipe the candidates (domain, group size) of a layer, and the moments that they read."""

from __future__ import annotations

from ..bases.layer import needed_statistics
from ..bases.registry import QK_METHODS
from ..errors import RecipeError
from ..format.layout import AttentionShape, Candidate, Domain
from ..prediction.cost import DecodeStep
from ..prediction.decode_times import group_sizes, largest_fast_group
from ..prediction.devices import find_device
from ..recipe import Recipe
from ..runtime.families import Family

Candidates = dict[str, Candidate]
"""The candidates by key (`pre-8`); the same for every layer."""


def candidates_of(recipe: Recipe, family: Family, shape: AttentionShape, fixed_rope: bool = True) -> Candidates:
    """List the candidates that the ranks choose among for each layer, the first the widest.

    Args:
        fixed_rope: the frequencies of RoPE are the same at every length. Where they are not, what is stored turned
            within blocks would be turned by others than what comes later: `block` is then `post`.
    Raises:
        RecipeError: the recipe needs RoPE and the model has none, or its group size does not divide the KV heads.
    """
    found = {}
    in_blocks = recipe.groups.domain == "block" and family.rotary is not None and fixed_rope
    for domain in _domains(recipe, family, fixed_rope):
        kind = Candidate(domain, 1, False, recipe.groups.rope_block if in_blocks else 1)
        # Keys that are as linear in the hidden state as values can share a latent with them; so can their turns within
        # a block, as the slow planes hardly turn there.
        kind = kind._replace(joint=recipe.joins_latents and (kind.folds_keys(family.has_key_norm) or in_blocks))
        for size in _group_sizes(recipe, shape, kind, family.has_key_norm):
            found[f"{'block' if in_blocks else domain}-{size}"] = kind._replace(group_size=size)
    return found


def wanted_moments(recipe: Recipe, candidates: Candidates) -> frozenset[str]:
    """Names of the moments that the recipe's methods read for these candidates."""
    bases, kinds = recipe.bases, sorted({(found.domain, found.joint) for found in candidates.values()})
    return frozenset().union(
        *(needed_statistics(bases.qk, bases.vo, domain, bases.refit, joint) for domain, joint in kinds)
    )


def wanted_gradients(candidates: Candidates) -> frozenset[str]:
    """Names of what gradients are taken by where a recipe needs any."""
    wanted: set[str] = set()
    for candidate in candidates.values():
        keys = "key_pre" if candidate.domain == "pre" else "key_post"
        wanted |= {"joint"} if candidate.joint else {keys, "value"}
    return frozenset(wanted)


def _domains(recipe: Recipe, family: Family, fixed_rope: bool) -> list[Domain]:
    if family.rotary is None:
        if "none" not in recipe.bases.methods[0].domains:
            others = ", ".join(name for name, method in QK_METHODS.items() if "none" in method.domains)
            raise RecipeError(
                f"bases.qk: {recipe.bases.qk} needs RoPE, which this model does not have.", f"Choose one of {others}."
            )
        return ["none"]
    if recipe.groups.domain == "any":
        return ["pre", "post"]
    if recipe.groups.domain == "block":
        return ["pre" if fixed_rope else "post"]
    return [recipe.groups.domain]


def _group_sizes(recipe: Recipe, shape: AttentionShape, kind: Candidate, has_key_norm: bool) -> list[int]:
    heads = shape.num_kv_heads
    if recipe.groups.size == "any":
        return group_sizes(shape)[::-1]
    if recipe.groups.size == "auto":
        load, bits = recipe.objective, 4 if recipe.coded else 16
        device, step = find_device(load.device, load.device_file), DecodeStep(load.context_tokens, load.batch_size)
        return [largest_fast_group(shape, kind, kind.folds_keys(has_key_norm), bits, device, step)]
    size = heads if recipe.groups.size == "all" else int(recipe.groups.size)
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads.", "Choose a divisor, all, auto or any."
        )
    return [size]
