"""Derive from a recipe the candidates (domain, group size) of a layer, and the moments that they read."""

from __future__ import annotations

from ..bases.layer import needed_statistics
from ..bases.registry import QK_METHODS
from ..errors import RecipeError
from ..format.layout import AttentionShape, Candidate, Domain, folds_keys
from ..prediction.cost import DecodeStep
from ..prediction.decode_times import group_sizes, largest_fast_group
from ..prediction.devices import find_device
from ..recipe import Recipe
from ..runtime.families import Family

Candidates = dict[str, Candidate]
"""The candidates by key (`pre-8`); the same for every layer."""


def candidates_of(recipe: Recipe, family: Family, shape: AttentionShape) -> Candidates:
    """List the candidates that the ranks choose among for each layer, the first the widest.

    Raises:
        RecipeError: the recipe needs RoPE and the model has none, or its group size does not divide the KV heads.
    """
    found = {}
    for domain in _domains(recipe, family):
        # Where the key basis folds into W_k, keys are as linear in the hidden states as values and can share a latent.
        folded = folds_keys(domain, family.has_key_norm)
        for size in _group_sizes(recipe, shape, domain, folded):
            found[f"{domain}-{size}"] = Candidate(domain, size, recipe.joins_latents and folded)
    return found


def wanted_moments(recipe: Recipe, candidates: Candidates) -> frozenset[str]:
    """Names of the moments that the recipe's methods read for these candidates."""
    bases, kinds = recipe.bases, sorted({(domain, joint) for domain, _, joint in candidates.values()})
    return frozenset().union(
        *(needed_statistics(bases.qk, bases.vo, domain, bases.refit, joint) for domain, joint in kinds)
    )


def wanted_gradients(candidates: Candidates) -> frozenset[str]:
    """Names of what gradients are taken by where a recipe needs any."""
    wanted: set[str] = set()
    for domain, _, joint in candidates.values():
        wanted |= {"joint"} if joint else {"key_pre" if domain == "pre" else "key_post", "value"}
    return frozenset(wanted)


def _domains(recipe: Recipe, family: Family) -> list[Domain]:
    if family.rotary is None:
        if "none" not in recipe.bases.methods[0].domains:
            others = ", ".join(name for name, method in QK_METHODS.items() if "none" in method.domains)
            raise RecipeError(
                f"bases.qk: {recipe.bases.qk} needs RoPE, which this model does not have.", f"Choose one of {others}."
            )
        return ["none"]
    return ["pre", "post"] if recipe.groups.domain == "any" else [recipe.groups.domain]


def _group_sizes(recipe: Recipe, shape: AttentionShape, domain: Domain, folded: bool) -> list[int]:
    heads = shape.num_kv_heads
    if recipe.groups.size == "any":
        return group_sizes(shape)[::-1]
    if recipe.groups.size == "auto":
        load, bits = recipe.objective, 4 if recipe.coded else 16
        device, step = find_device(load.device, load.device_file), DecodeStep(load.context_tokens, load.batch_size)
        return [largest_fast_group(shape, domain, folded, recipe.joins_latents and folded, bits, device, step)]
    size = heads if recipe.groups.size == "all" else int(recipe.groups.size)
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads.", "Choose a divisor, all, auto or any."
        )
    return [size]
