"""Recipes: what to sample, which bases to compute, how ranks are chosen, and how accuracy is measured.

A recipe is a YAML file read into frozen dataclasses. Every key is checked: an unknown one is an error that names the
nearest known key. Any field can be overridden by its dotted name (`tokens.count=16384`).

What this package offers is imported when it is first used: `rotor --help` and `rotor generate` read no recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..facade import lazy

if TYPE_CHECKING:
    from .reading import bundled_recipes as bundled_recipes
    from .reading import distance_overrides as distance_overrides
    from .reading import load_recipe as load_recipe
    from .reading import load_stored_recipe as load_stored_recipe
    from .reading import override as override
    from .reading import parse_recipe as parse_recipe
    from .reading import quick_overrides as quick_overrides
    from .reading import text_overrides as text_overrides
    from .recipe import EXPORT_SECTIONS as EXPORT_SECTIONS
    from .recipe import Recipe as Recipe
    from .sections import Evaluation as Evaluation
    from .sections import ObjectiveSettings as ObjectiveSettings
    from .sections import Prune as Prune
    from .sections import Ranks as Ranks
    from .sections import Tokens as Tokens

_MODULES = {
    "reading": "bundled_recipes distance_overrides load_recipe load_stored_recipe override parse_recipe "
    "quick_overrides text_overrides",
    "recipe": "EXPORT_SECTIONS Recipe",
    "sections": "Evaluation ObjectiveSettings Prune Ranks Tokens",
}
__getattr__ = lazy(__name__, _MODULES)
