"""Recipes: what to sample, which bases to compute, how ranks are chosen, and how accuracy is measured.

A recipe is a YAML file read into frozen dataclasses. Every key is checked: an unknown one is an error that names the
nearest known key. Any field can be overridden by its dotted name (`tokens.count=16384`).
"""

from .reading import (
    bundled_recipes,
    distance_overrides,
    load_recipe,
    load_stored_recipe,
    override,
    parse_recipe,
    text_overrides,
)
from .recipe import EXPORT_SECTIONS, Recipe
from .sections import Evaluation, ObjectiveSettings, Prune, Ranks, Tokens

__all__ = [
    "EXPORT_SECTIONS",
    "Evaluation",
    "ObjectiveSettings",
    "Prune",
    "Ranks",
    "Recipe",
    "Tokens",
    "bundled_recipes",
    "distance_overrides",
    "load_recipe",
    "load_stored_recipe",
    "override",
    "parse_recipe",
    "text_overrides",
]
