"""Derive from a recipe the candidates (domain, group size) of a layer, and the moments that they read."""

from __future__ import annotations

from ..bases.layer import needed_statistics
from ..bases.registry import QK_METHODS
from ..errors import RecipeError
from ..format.layout import AttentionShape, Candidate, Domain, folds_keys
from ..recipe import Recipe
from ..runtime.families import Family

Candidates = dict[str, Candidate]
"""The candidates by key (`pre-8`); the same for every layer."""


def candidates_of(recipe: Recipe, family: Family, shape: AttentionShape) -> Candidates:
    """List the candidates that the ranks choose among for each layer, the first the widest.

    Raises:
        RecipeError: the recipe needs RoPE and the model has none, or its group size does not divide the KV heads.
    """
    sizes = _group_sizes(recipe, shape)
    # Where the key basis folds into W_k, keys are as linear in the hidden states as values: they can share a latent.
    return {
        f"{domain}-{size}": Candidate(domain, size, recipe.joins_latents and folds_keys(domain, family.has_key_norm))
        for domain in _domains(recipe, family)
        for size in sizes
    }


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


def _group_sizes(recipe: Recipe, shape: AttentionShape) -> list[int]:
    heads = shape.num_kv_heads
    if recipe.groups.size == "any":
        return [size for size in range(heads, 0, -1) if heads % size == 0]
    size = heads if recipe.groups.size == "all" else int(recipe.groups.size)
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads.", "Choose a divisor, all, or any."
        )
    return [size]
