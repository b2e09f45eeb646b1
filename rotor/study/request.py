"""What a study is asked to do, checked before anything is measured: parts, recipes, ablations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..checked import Reader
from ..errors import RecipeError, UsageError
from ..format.yaml_files import read_text, read_yaml
from ..recipe import Recipe, load_recipe, override
from .parts import ALL, DEFAULT, ON_REQUEST, PARTS

ABLATION, TASKS = "ablation", "tasks"
TOKEN_COUNTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)

OWN = "study."
"""Begins the settings of the study alone, which are given like those of recipes."""

Part = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class StudySettings:
    """What holds for all parts about caches: `--set study.NAME=VALUE`.

    prompt_share: of a row of text, that is the prompt where caches are read step by step. GEAR's tasks have three
        quarters (900 tokens of 1156 in GSM8k).
    budgets: shares of a whole row's tokens that evicting methods keep (SqueezeAttention figure 3: 0.1 to 1).
    squeeze: p of SqueezeAttention, each of which gets rows in `budgets`: what the least important layers keep of their
        budget. Its text removes 0.1 to 0.2, so that they keep 0.8 to 0.9; its Algorithm 1 with that p keeps 0.15.
    accuracy: that `combine` searches for. caches: policies of your own for `methods`, as `--cache` takes them.
    """

    prompt_share: Part = 0.75
    budgets: tuple[Part, ...] = (0.1, 0.2, 0.3, 0.5, 0.7)
    squeeze: tuple[Part, ...] = (0.85, 0.15)
    accuracy: Part = 0.99
    caches: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyPlan:
    """A study request, checked before anything is measured.

    parts: names of those to run, in the order of PARTS. recipes: by name, under the same conditions. focus: names of
    those that the parts are about which calibrate many times. base: what the ablations change, or None without them;
    variants: its ablations by name. at: compression at which `tokens` and `pruning` are measured. counts: numbers of
    calibration tokens.
    sizes: bytes of cache per token, or None for the default.
    tasks: benchmarks of the part `tasks`; lengths: tokens of the documents of those that have any length.
    """

    parts: tuple[str, ...]
    recipes: dict[str, Recipe]
    focus: tuple[str, ...]
    base: Recipe | None
    variants: dict[str, Recipe]
    at: float = 0.5
    counts: tuple[int, ...] = TOKEN_COUNTS
    sizes: tuple[int, ...] | None = None
    settings: StudySettings = field(default_factory=StudySettings)
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (4096,)

    @classmethod
    def of(
        cls,
        recipes: Iterable[str],
        overrides: Iterable[str] = (),
        *,
        parts: Iterable[str] | None = None,
        focus: Iterable[str] | None = None,
        ablations: Mapping[str, list[str]] | None = None,
        ablation_base: str = "rotor",
        at: float = 0.5,
        counts: Iterable[int] = TOKEN_COUNTS,
        sizes: Iterable[int] | None = None,
        tasks: Iterable[str] = (),
        lengths: Iterable[int] = (4096,),
    ) -> StudyPlan:
        """Raises UsageError where the requests contradict each other; the arguments are those of `study`."""
        if not 0 < at < 1:
            raise UsageError(f"--at {at}: expected a compression between 0 and 1.")
        settings, overrides = split_overrides(overrides)
        named, ablations = None if parts is None else list(parts), ablations or {}
        tasks = tuple(tasks)
        if TASKS in (named or ()) and not tasks:
            raise UsageError("--parts tasks: there are no tasks.", "Name some with --tasks.")
        chosen = _chosen_parts(named, ablations)
        chosen += (TASKS,) if tasks and TASKS not in chosen else ()
        found = same_conditions([load_recipe(name, overrides) for name in recipes], overrides)
        names = tuple(focus) if focus is not None else tuple(found)[:1]
        for name in names:
            if name not in found:
                known = ", ".join(found)
                raise UsageError(f"--focus {name}: not among the recipes of the study.", f"They are {known}.")
        ablated: tuple[Recipe | None, dict[str, Recipe]] = None, {}
        if ABLATION in chosen:
            ablated = _ablated(ablation_base, ablations, found, overrides)
        of_bytes = None if sizes is None else tuple(sizes)
        benchmarks = tasks, tuple(lengths)
        return cls(chosen, found, names, *ablated, at, tuple(counts), of_bytes, settings, *benchmarks)

    @property
    def first(self) -> Recipe:
        """The recipe whose conditions are those of all."""
        return next(iter(self.recipes.values()))


def parse_ablations(items: Iterable[str], path: Path | None) -> dict[str, list[str]]:
    """Parse overrides by name, of `NAME:KEY=VALUE ...` items and of a YAML file that maps names to lists of KEY=VALUE.

    Raises:
        RecipeError: not of that form, or a name given twice.
    """
    given: list[tuple[Any, Any]] = [(name.strip(), rest.split()) for name, _, rest in (i.partition(":") for i in items)]
    if path is not None:
        data = read_yaml(read_text(path, f"--ablations {path}"), f"--ablations {path}")
        if not isinstance(data, dict):
            raise RecipeError(f"--ablations {path}: expected a mapping from names to lists of KEY=VALUE.")
        given += data.items()
    found: dict[str, list[str]] = {}
    for name, changes in given:
        if not name or not isinstance(changes, list) or not changes or not all(isinstance(c, str) for c in changes):
            raise RecipeError(
                f"ablation {name}: expected a name and a list of KEY=VALUE.",
                'Example: --ablation "per-head:groups.size=1"',
            )
        if _file_name(str(name)) in map(_file_name, found):
            raise RecipeError(f"ablation {str(name)!r} is given twice.", "Give every ablation a name of its own.")
        found[str(name)] = changes
    return found


def parse_counts(items: Iterable[str], option: str = "--counts", unit: str = "tokens") -> tuple[int, ...]:
    """Parse positive numbers of tokens, or of what `unit` says.

    Raises:
        UsageError: not such numbers; names the option.
    """
    items = list(items)
    if not items or not all(item.isdecimal() and int(item) > 0 for item in items):
        raise UsageError(f"{option} {','.join(items)}: expected positive numbers of {unit}.", "Example: 512,4096")
    return tuple(int(item) for item in items)


def split_overrides(overrides: Iterable[str]) -> tuple[StudySettings, list[str]]:
    """The settings of the study, and the overrides that are of recipes.

    Raises:
        UsageError: no such setting, or a value that does not fit.
    """
    overrides = list(overrides)
    own = [item.removeprefix(OWN).partition("=") for item in overrides if item.startswith(OWN)]
    data = {name: read_yaml(value, f"--set {OWN}{name}") for name, _, value in own}
    settings: StudySettings = Reader("--set study", UsageError).read(StudySettings, data)
    return settings, [item for item in overrides if not item.startswith(OWN)]


def same_conditions(recipes: list[Recipe], overrides: list[str]) -> dict[str, Recipe]:
    """Put the recipes, by name, under one number of tokens, seed, row length, evaluation and search for all.

    Raises:
        UsageError: no recipes, or two of one name.
    """
    if not recipes:
        raise UsageError("--recipes: no recipes to compare.", "Give names or YAML files: --recipes fdc,rotor")
    first, count = recipes[0], max(recipe.tokens.count for recipe in recipes)
    found: dict[str, Recipe] = {}
    for recipe in map(_named, recipes):
        if recipe.name in found:
            raise UsageError(f"--recipes: two recipes are named {recipe.name!r}.", "Change `name` in one of the files.")
        found[recipe.name] = _under_conditions(recipe, first, count, overrides)
    return found


def _under_conditions(recipe: Recipe, first: Recipe, count: int, overrides: list[str]) -> Recipe:
    tokens = replace(recipe.tokens, count=count, seq_len=first.tokens.seq_len, seed=first.tokens.seed)
    same = replace(recipe, tokens=tokens, evaluation=first.evaluation, search=first.search)
    return override(same, overrides)


def _ablated(
    base: str, ablations: Mapping[str, list[str]], recipes: dict[str, Recipe], overrides: list[str]
) -> tuple[Recipe, dict[str, Recipe]]:
    """The recipe `base` under the study's conditions, and with the overrides of each ablation."""
    first = next(iter(recipes.values()))
    for change in (change for changes in ablations.values() for change in changes):
        if change.split(".")[0] in ("evaluation", "search"):
            raise UsageError(
                f"ablation {change}: all are measured the same way.", "Give it with --set, for all of them."
            )
    recipe = recipes.get(base)
    if recipe is None:
        loaded = _named(load_recipe(base, overrides))
        recipe = recipes.get(loaded.name) or _under_conditions(loaded, first, first.tokens.count, overrides)
    return recipe, {
        _file_name(f"{recipe.name}-{name}"): override(recipe, changes) for name, changes in ablations.items()
    }


def _chosen_parts(named: list[str] | None, ablations: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The parts to run, the bundled ones in the order of PARTS."""
    wanted = list(DEFAULT) if named is None else named
    if not wanted:
        raise UsageError(f"--parts is empty: expected some of {', '.join(PARTS)}, or {ALL}.")
    if named is not None and ABLATION in named and not ablations:
        raise UsageError("--parts ablation: there are no ablations; give --ablation or --ablations.")
    bundled = [name for name in PARTS if name in wanted or (ALL in wanted and name not in ON_REQUEST)]
    ordered = dict.fromkeys(bundled + [name for name in wanted if name not in (*PARTS, ALL)])
    return tuple(name for name in ordered if ablations or name != ABLATION)


def _named(recipe: Recipe) -> Recipe:
    """With a name that can be a folder's."""
    return replace(recipe, name=_file_name(recipe.name))


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "recipe"
