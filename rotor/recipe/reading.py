"""Recipes read from YAML, bundled or a user's, and overridden field by field."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources
from itertools import takewhile
from pathlib import Path

from ..checked import Reader, nearest_name
from ..checkpoint.files import INFO, RECIPE, ROTOR_JSON, read_json, read_text, read_yaml
from ..checkpoint.schemas import check_version
from ..errors import CheckpointError, RecipeError
from .recipe import Recipe

FIELDS_HINT = "`rotor recipes --fields` has every field, what it may be and what it decides."


def bundled_recipes() -> dict[str, Recipe]:
    """The recipes that come with rotor, by name."""
    files = (file for file in resources.files("rotor.recipes").iterdir() if file.name.endswith(".yaml"))
    return {
        file.name.removesuffix(".yaml"): parse_recipe(file.read_text("utf-8"), file.name)
        for file in sorted(files, key=lambda file: file.name)
    }


def load_recipe(recipe: str | Recipe, overrides: Iterable[str] = ()) -> Recipe:
    """Read a bundled recipe by name, or any recipe by path, and apply overrides `section.field=value`.

    Args:
        recipe: a name, a path, or a recipe that is there already.

    Raises:
        RecipeError: no such recipe, not valid YAML, an unknown key or a value of the wrong type.
    """
    return override(recipe if isinstance(recipe, Recipe) else _named(recipe), overrides)


def comments_of(recipe: str) -> str:
    """Read what the file of a bundled recipe says before its first field: what it is, and how it differs from its
    paper; nothing of other recipes."""
    file = resources.files("rotor.recipes") / f"{recipe}.yaml"
    if recipe not in bundled_recipes():
        return ""
    lines = file.read_text("utf-8").splitlines(keepends=True)
    return "".join(takewhile(lambda line: line.startswith("#"), lines))


def load_stored_recipe(folder: Path) -> Recipe:
    """The recipe of a run or a checkpoint; raises CheckpointError for a damaged one."""
    try:
        return _named(str(folder / RECIPE))
    except RecipeError as error:
        for path in (folder / INFO, folder / ROTOR_JSON):
            if path.is_file():
                check_version(path, read_json(path, "Calibrate or export again."))
        raise CheckpointError(error.message, "It is damaged: calibrate or export again.") from error


def text_overrides(
    text: str | Path | Iterable[str | Path], sections: Iterable[str] = ("tokens", "evaluation")
) -> tuple[str, ...]:
    """Overrides that read the text of files or folders in these sections, wherever they are used later.

    With both sections its documents are dealt to the three splits, of which one is calibrated on.
    """
    paths = [text] if isinstance(text, (str, Path)) else text
    places = [str(Path(path).expanduser().absolute()) for path in paths]
    if not places:
        return ()
    place = json.dumps(places[0] if len(places) == 1 else places)
    return tuple(item for section in sections for item in (f"{section}.source=text", f"{section}.path={place}"))


QUICK = {
    "tokens.count": 16384,
    "codes.tokens": 16384,
    "evaluation.quick": "true",
    "evaluation.search_tokens": 4096,
    "evaluation.report_tokens": 4096,
    "evaluation.lookup_prompts": 12,
    "evaluation.copy_prompts": 12,
    "search.resolution": 0.01,
    "search.tries": 0,
}
"""Settings of --quick: a first look at a model of 270 M parameters takes minutes of a core in place of hours."""


def quick_overrides(recipe: Recipe, sections: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The overrides of --quick, in the sections that a recipe has.

    Args:
        sections: the only sections that may be changed, or None for all.
    """
    there = {name for name, section in recipe.to_dict().items() if section is not None}
    chosen = there if sections is None else there & {*sections}
    return tuple(f"{name}={value}" for name, value in QUICK.items() if name.partition(".")[0] in chosen)


NEWEST_SHARE, FEWEST_NEWEST = 32, 32
"""Tokens of a sequence for each newest one that is kept exactly, and the least number of newest ones."""


def context_overrides(recipe: Recipe, tokens: int | None) -> tuple[str, ...]:
    """The override of --context: short sequences keep fewer newest tokens exactly, whose bytes weigh more there.

    SmolLM2 at 4,221 bytes a token of 2,048 tokens: KL 0.0069 with 64 exact ones, about 0.0091 with 128 and fewer bits;
    of 4,096 tokens 128 are better.
    """
    newest = recipe.exact.newest
    if tokens is None or newest <= max(FEWEST_NEWEST, tokens // NEWEST_SHARE):
        return ()
    return (f"exact.newest={max(FEWEST_NEWEST, tokens // NEWEST_SHARE)}",)


def _named(name_or_path: str) -> Recipe:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return parse_recipe(read_text(path, f"recipe {name_or_path}"), name_or_path)
    bundled = bundled_recipes()
    if name_or_path not in bundled:
        raise RecipeError(
            f"recipe {name_or_path!r} is neither bundled nor a file{nearest_name(name_or_path, bundled)}",
            f"Bundled recipes: {', '.join(bundled)}; or give the path of a YAML file.",
        )
    return bundled[name_or_path]


@lru_cache(maxsize=32)  # each step of a command reads the recipe of its run
def parse_recipe(text: str, where: str) -> Recipe:
    """Parse a recipe's YAML text; `where` names it in errors."""
    return _read(read_yaml(text, f"recipe {where}"), where)


def override(recipe: Recipe, overrides: Iterable[str], sections: tuple[str, ...] | None = None) -> Recipe:
    """Apply `section.field=value` overrides; values are YAML.

    Args:
        sections: the only sections that may be changed, or None for all.
    """
    data = recipe.to_dict()
    overrides = list(overrides)
    for item in overrides:
        name, equals, value = item.partition("=")
        *above, last = name.strip().split(".")
        if not equals or not last or not all(above):
            raise RecipeError(f"--set {item}: expected section.field=value.", "Example: --set tokens.count=16384")
        if sections is not None and [*above, last][0] not in sections:
            raise RecipeError(
                f"--set {item}: only {', '.join(sections)} can be changed after calibration.",
                "Calibrate again with this setting.",
            )
        target = data
        for key in above:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise RecipeError(f"--set {item}: {key} has no fields of its own.", FIELDS_HINT)
        if isinstance(target.get(last), dict):
            raise RecipeError(f"--set {item}: {last} is a section.", "Set its fields: --set SECTION.FIELD=VALUE")
        target[last] = read_yaml(value, f"--set {item}")
    return _read(data, "--set" if overrides else recipe.name)


def _read(data: object, where: str) -> Recipe:
    recipe: Recipe = Reader(f"recipe {where}", hint=FIELDS_HINT).read(Recipe, data)
    return recipe
