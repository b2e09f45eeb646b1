"""What a study is asked to do, checked before anything is measured: parts, recipes, ablations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import RecipeError, UsageError
from ..format.yaml_files import read_text, read_yaml
from ..recipe import Recipe, load_recipe, override
from .parts import ALL, DEFAULT, ON_REQUEST, PARTS

ABLATION, TASKS = "ablation", "tasks"
TOKEN_COUNTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)

PROMPT_SHARE = "study.prompt_share"
"""A setting of the study alone, given like those of recipes."""


@dataclass(frozen=True)
class StudyPlan:
    """A study request, checked before anything is measured.

    parts: names of those to run, in the order of PARTS; named: of them, the ones that were asked for by name.
    recipes: by name, under the same conditions. focus: names of those that the parts are about which calibrate many
    times, or search many targets. base: what the ablations change, or None without them; variants: its ablations by
    name. at: compression at which `tokens` and `pruning` are measured. counts: numbers of calibration tokens.
    sizes: bytes of cache per token, or None for the default.
    tasks: benchmarks of the part `tasks`; lengths: tokens of the documents of those that have any length.
    prompt_share: of a row of text, that is the prompt where caches are read step by step.
    """

    parts: tuple[str, ...]
    named: tuple[str, ...]
    recipes: dict[str, Recipe]
    focus: tuple[str, ...]
    base: Recipe | None
    variants: dict[str, Recipe]
    at: float = 0.5
    counts: tuple[int, ...] = TOKEN_COUNTS
    sizes: tuple[int, ...] | None = None
    prompt_share: float = 0.25
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
        prompt_share, overrides = split_overrides(overrides)
        named, ablations = None if parts is None else list(parts), ablations or {}
        tasks = tuple(tasks)
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
        own = tuple(named or ())
        return cls(chosen, own, found, names, *ablated, at, tuple(counts), of_bytes, prompt_share, *benchmarks)

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


def split_overrides(overrides: Iterable[str]) -> tuple[float, list[str]]:
    """The prompt's share of a row, and the overrides that are of recipes."""
    overrides = list(overrides)
    own = [item for item in overrides if item.startswith(f"{PROMPT_SHARE}=")]
    share = own[-1].partition("=")[2] if own else f"{StudyPlan.prompt_share}"
    if not re.fullmatch(r"0?\.\d*[1-9]\d*", share):
        raise UsageError(f"--set {PROMPT_SHARE}={share}: expected a share between 0 and 1.")
    return float(share), [item for item in overrides if item not in own]


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
