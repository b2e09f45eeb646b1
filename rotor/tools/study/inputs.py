"""The recipes, sizes and caches that a study compares, checked before anything is measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...errors import UsageError
from ...recipe.reading import context_overrides, load_recipe, override
from ...recipe.recipe import Recipe


@dataclass(frozen=True)
class StudyInputs:
    """The subjects of a study's parts.

    recipes: by name, under the same conditions.
    sizes: bytes of cache per token, if any are asked for. caches: further cache policies.
    """

    recipes: dict[str, Recipe]
    sizes: tuple[int, ...] = ()
    caches: tuple[str, ...] = ()

    @property
    def first(self) -> Recipe:
        """The recipe whose conditions are those of all."""
        return next(iter(self.recipes.values()))


def same_conditions(recipes: Iterable[str], overrides: Iterable[str], context: int | None = None) -> dict[str, Recipe]:
    """The recipes by name, under one number of tokens, seed, row length, evaluation and search for all.

    Args:
        context: tokens of the sequences that are served, if the user named them.
    Raises:
        UsageError: no recipes, or two of one name.
    """
    loaded = [load_recipe(name, overrides) for name in recipes]
    if not loaded:
        raise UsageError("--recipes: no recipes to compare.", "Give names or YAML files: --recipes fdc,rotor")
    first, recipes_by_name = loaded[0], dict[str, Recipe]()
    count = max(recipe.tokens.count for recipe in loaded)
    for recipe in loaded:
        name = re.sub(r"[^\w.+-]+", "-", recipe.name).strip("-.") or "recipe"
        if name in recipes_by_name:
            raise UsageError(f"--recipes: two recipes are named {name!r}.", "Change `name` in one of the files.")
        tokens = replace(recipe.tokens, count=count, seq_len=first.tokens.seq_len, seed=first.tokens.seed)
        same = replace(recipe, name=name, tokens=tokens, evaluation=first.evaluation, search=first.search)
        recipes_by_name[name] = override(same, (*context_overrides(same, context), *overrides))
    return recipes_by_name
