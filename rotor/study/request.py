"""What a study is asked to do, checked before anything is measured: parts, recipes, ablations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..allocation.registry import CHOOSING
from ..errors import RecipeError, UsageError
from ..format.yaml_files import read_text, read_yaml
from ..recipe import Recipe, load_recipe, override

CACHE_PARTS = ("quantise", "evict", "budgets", "combine")
"""Policies of the cache."""

ON_REQUEST = ("peers", *CACHE_PARTS, "tiers")
"""Parts that take longest, and are only run when they are named."""

PARTS = ("curves", "sources", "tokens", "degradation", "ablation", "front", *ON_REQUEST)
"""What a study can measure, in the order in which it does."""

DEFAULT_PARTS = ("curves", "ablation")
"""Without a request: one calibration a recipe. Each of the others calibrates many times, or searches many targets."""

ALL = "all"
"""Stands for all parts that can run, but ON_REQUEST."""


@dataclass(frozen=True)
class StudyPlan:
    """A study request, checked before anything is measured.

    parts: those to run, in the order of PARTS. recipes: by name, under the same conditions. focus: names of those that
    all parts but `curves`, `ablation`, `peers` and CACHE_PARTS are about; allocating: of these, the ones whose ranks
    choose form and group size. base: what the ablations change, or None without them; variants: its ablations by
    name. counts: numbers of calibration tokens. sizes: bytes of cache per token, or None for the default.
    """

    parts: tuple[str, ...]
    recipes: dict[str, Recipe]
    focus: tuple[str, ...]
    allocating: tuple[str, ...]
    base: Recipe | None
    variants: dict[str, Recipe]
    counts: tuple[int, ...]
    sizes: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        recipes: list[str],
        overrides: list[str],
        parts: Iterable[str] | None,
        focus: Iterable[str] | None,
        ablations: Mapping[str, list[str]],
        ablation_base: str,
        counts: tuple[int, ...],
        sizes: tuple[int, ...] | None,
    ) -> StudyPlan:
        """Raises UsageError where the requests contradict each other; the arguments are those of `study`."""
        asked = None if parts is None else list(parts)
        chosen = _chosen_parts(asked, ablations)
        found = same_conditions([load_recipe(name, overrides) for name in recipes], overrides)
        names = tuple(focus) if focus is not None else tuple(found)[:1]
        for name in names:
            if name not in found:
                raise UsageError(
                    f"--focus {name}: not among the recipes of the study.", f"They are {', '.join(found)}."
                )
        allocating = tuple(name for name in names if found[name].ranks.rule.chooses)
        if asked is not None and "front" in asked and not allocating:
            raise UsageError(
                f"--parts front: the ranks of {', '.join(names)} do not choose form of keys and group size.",
                f"Give --focus a recipe with ranks.method={CHOOSING}, as rotor-16 has.",
            )
        base: Recipe | None = None
        variants: dict[str, Recipe] = {}
        if "ablation" in chosen:
            base, variants = _ablated(ablation_base, ablations, found, overrides)
        return cls(chosen, found, names, allocating, base, variants, counts, sizes)

    @property
    def first(self) -> Recipe:
        """The recipe whose conditions are those of all."""
        return next(iter(self.recipes.values()))


def parse_ablations(items: Iterable[str], path: Path | None) -> dict[str, list[str]]:
    """Parse overrides by name, of `NAME:KEY=VALUE ...` items and of a YAML file that maps names to lists of KEY=VALUE.

    Raises:
        RecipeError: not of that form, or a name given twice.
    """
    found: list[tuple[str, list[str]]] = []
    for item in items:
        name, colon, changes = item.partition(":")
        if not colon or not name.strip() or not changes.split():
            raise RecipeError(
                f"--ablation {item}: expected NAME:KEY=VALUE ...", 'Example: --ablation "per-head:groups.size=1"'
            )
        found.append((name.strip(), changes.split()))
    if path is not None:
        data = read_yaml(read_text(path, f"--ablations {path}"), f"--ablations {path}")
        if not isinstance(data, dict):
            raise RecipeError(f"--ablations {path}: expected a mapping from names to lists of KEY=VALUE.")
        for name, changes in data.items():
            if not isinstance(changes, list) or not changes or not all(isinstance(c, str) for c in changes):
                raise RecipeError(f"--ablations {path}: {name}: expected a list of KEY=VALUE.")
            found.append((str(name), changes))
    names = [_file_name(name) for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"ablation {name!r} is given twice.", "Give every ablation a name of its own.")
    return dict(found)


def parse_counts(items: Iterable[str], option: str = "--counts", unit: str = "tokens") -> tuple[int, ...]:
    """Parse positive numbers of tokens, or of what `unit` says.

    Raises:
        UsageError: not such numbers; names the option.
    """
    items = list(items)
    if not items or not all(item.isdecimal() and int(item) > 0 for item in items):
        raise UsageError(f"{option} {','.join(items)}: expected positive numbers of {unit}.", "Example: 512,4096")
    return tuple(int(item) for item in items)


def same_conditions(recipes: list[Recipe], overrides: list[str]) -> dict[str, Recipe]:
    """Put the recipes, by name, under one number of tokens, seed, row length, evaluation and search for all.

    Raises:
        UsageError: no recipes, or two of one name.
    """
    if not recipes:
        raise UsageError("--recipes: no recipes to compare.", "Give names or YAML files: --recipes fdc,rotor")
    first, count = recipes[0], max(recipe.tokens.count for recipe in recipes)
    specs: dict[str, Recipe] = {}
    for recipe in map(_named, recipes):
        if recipe.name in specs:
            raise UsageError(f"--recipes: two recipes are named {recipe.name!r}.", "Change `name` in one of the files.")
        specs[recipe.name] = _under_conditions(recipe, first, count, overrides)
    return specs


def _under_conditions(recipe: Recipe, first: Recipe, count: int, overrides: list[str]) -> Recipe:
    tokens = replace(recipe.tokens, count=count, seq_len=first.tokens.seq_len, seed=first.tokens.seed)
    same = replace(recipe, tokens=tokens, evaluation=first.evaluation, search=first.search)
    return override(same, overrides)


def _ablated(
    base: str, ablations: Mapping[str, list[str]], specs: dict[str, Recipe], overrides: list[str]
) -> tuple[Recipe, dict[str, Recipe]]:
    """The recipe `base` under the study's conditions, and with the overrides of each ablation."""
    first = next(iter(specs.values()))
    for change in (change for changes in ablations.values() for change in changes):
        if change.split(".")[0] in ("evaluation", "search"):
            raise UsageError(
                f"ablation {change}: all are measured the same way.", "Give it with --set, for all of them."
            )
    recipe = specs.get(base)
    if recipe is None:
        loaded = _named(load_recipe(base, overrides))
        recipe = specs.get(loaded.name) or _under_conditions(loaded, first, first.tokens.count, overrides)
    changed = {_file_name(f"{recipe.name}-{name}"): override(recipe, changes) for name, changes in ablations.items()}
    return recipe, changed


def _chosen_parts(parts: list[str] | None, ablations: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The parts to run, in the order of PARTS."""
    if parts is None:
        wanted = list(DEFAULT_PARTS)
    else:
        wanted = [p for part in parts for p in ([p for p in PARTS if p not in ON_REQUEST] if part == ALL else (part,))]
    unknown = [part for part in wanted if part not in PARTS]
    if unknown or not wanted:
        raise UsageError(f"--parts {','.join(unknown) or 'is empty'}: expected some of {', '.join(PARTS)}, or {ALL}.")
    if not ablations:
        if parts is not None and "ablation" in parts:
            raise UsageError("--parts ablation: there are no ablations; give --ablation or --ablations.")
        wanted = [part for part in wanted if part != "ablation"]
    return tuple(part for part in PARTS if part in wanted)


def _named(recipe: Recipe) -> Recipe:
    """With a name that can be a folder's."""
    return replace(recipe, name=_file_name(recipe.name))


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "recipe"
