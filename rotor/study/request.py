"""What a study is asked to do, checked before anything is measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..errors import UsageError
from ..recipe import Recipe, load_recipe, override
from .parts import DEFAULT, PARTS


@dataclass(frozen=True)
class StudyPlan:
    """What the parts of a study measure.

    recipes: by name, under the same conditions. variants: of the first of them, by name, with an ablation's overrides.
    sizes: bytes of cache per token, if any are asked for. caches: policies of your own.
    tasks: benchmarks; lengths: tokens of the documents of those that have any length.
    """

    recipes: dict[str, Recipe]
    variants: dict[str, Recipe] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    caches: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (4096,)

    @property
    def first(self) -> Recipe:
        """The recipe whose conditions are those of all."""
        return next(iter(self.recipes.values()))


def chosen_parts(parts: Iterable[str] | None, ablations: Mapping[str, list[str]], tasks: Iterable[str]) -> list[str]:
    """The parts to run, the bundled ones first, in the order of PARTS.

    Raises:
        UsageError: there is none, or nothing for one to do.
    """
    wanted = list(DEFAULT if parts is None else parts)
    if not wanted:
        raise UsageError(f"--parts is empty: expected some of {', '.join(PARTS)}, or FILE.py:CLASS.")
    if parts is not None and "ablation" in wanted and not ablations:
        raise UsageError("--parts ablation: there are no ablations.", "Give a file of some with --ablations.")
    if "tasks" in wanted and not tasks:
        raise UsageError("--parts tasks: there are no tasks.", "Name some with --tasks.")
    wanted += ["tasks"] if tasks else []
    ordered = dict.fromkeys([name for name in PARTS if name in wanted] + wanted)
    return [name for name in ordered if ablations or name != "ablation"]


def same_conditions(recipes: Iterable[str], overrides: list[str]) -> dict[str, Recipe]:
    """The recipes by name, under one number of tokens, seed, row length, evaluation and search for all.

    Raises:
        UsageError: no recipes, or two of one name.
    """
    loaded = [load_recipe(name, overrides) for name in recipes]
    if not loaded:
        raise UsageError("--recipes: no recipes to compare.", "Give names or YAML files: --recipes fdc,rotor")
    first, found = loaded[0], dict[str, Recipe]()
    count = max(recipe.tokens.count for recipe in loaded)
    for recipe in loaded:
        name = _file_name(recipe.name)
        if name in found:
            raise UsageError(f"--recipes: two recipes are named {name!r}.", "Change `name` in one of the files.")
        tokens = replace(recipe.tokens, count=count, seq_len=first.tokens.seq_len, seed=first.tokens.seed)
        same = replace(recipe, name=name, tokens=tokens, evaluation=first.evaluation, search=first.search)
        found[name] = override(same, overrides)
    return found


def ablated(recipe: Recipe, ablations: Mapping[str, list[str]]) -> dict[str, Recipe]:
    """The recipe with the overrides of each ablation, by a name that can be a folder's.

    Raises:
        UsageError: an override of how accuracy is measured.
    """
    for change in (change for changes in ablations.values() for change in changes):
        if change.split(".")[0] in ("evaluation", "search"):
            hint = "Give it with --set, for all of them."
            raise UsageError(f"ablation {change}: all are measured the same way.", hint)
    return {_file_name(f"{recipe.name}-{name}"): override(recipe, changes) for name, changes in ablations.items()}


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "recipe"
