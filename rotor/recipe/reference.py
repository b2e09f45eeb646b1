"""The reference of a recipe's fields, from the dataclasses and their docstrings: as docs/recipes.md, and as data.

Nothing here is written twice: types and defaults are the dataclasses', texts their docstrings', ranges and names those
that a recipe is checked by.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from typing import Any, get_type_hints

import yaml

from ..typed import describe
from .checks import NAMES, RANGES
from .metric_registry import LM_EVAL, METRICS
from .recipe import EXPORT_SECTIONS, Recipe

HEAD = """# Fields of a recipe

Written by `rotor recipes --fields > docs/recipes.md`. A recipe is a YAML file of these sections; what it leaves out has
the default. `rotor recipes --show NAME` prints a bundled one with all of them filled in, which is a file to start from;
any field can be changed on the command line: `--set SECTION.FIELD=VALUE`. On `rotor export` these sections can still be
changed: {sections}. The others need a new calibration.
"""


@dataclass(frozen=True)
class RecipeField:
    """One field.

    name: `section.field`, or of the recipe itself `field`. values: what it may be, in words. default: as YAML, or None
    where there is none. text: what it decides.
    """

    name: str
    values: str
    default: str | None
    text: str


def recipe_fields() -> dict[str, list[RecipeField]]:
    """The fields by section, in the order of a recipe; those of the recipe itself under an empty name."""
    hints = get_type_hints(Recipe)
    own = [field for field in dataclasses.fields(Recipe) if not dataclasses.is_dataclass(hints[field.name])]
    found = {"": [_field("", Recipe, field, hints) for field in own]}
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            types = get_type_hints(kind)
            found[name] = [_field(name, kind, field, types) for field in dataclasses.fields(kind)]
    return found


def reference_page() -> str:
    """All fields as a page of Markdown."""
    lines = [HEAD.format(sections=", ".join(f"`{name}`" for name in EXPORT_SECTIONS))]
    kinds = get_type_hints(Recipe)
    for section, fields in recipe_fields().items():
        about = _paragraphs(kinds[section] if section else Recipe)[0]
        lines += [f"## {section or 'The recipe'}", "", about, "", "| field | values | default | what it is |"]
        lines += ["|---|---|---|---|", *(f"| {' | '.join(_cells(field))} |" for field in fields), ""]
    return "\n".join(lines).rstrip()


def _cells(field: RecipeField) -> list[str]:
    default = "" if field.default is None else f"`{field.default}`"
    return [f"`{field.name}`", *(text.replace("|", r"\|") for text in (field.values, default, field.text))]


def _field(section: str, kind: type, field: dataclasses.Field[Any], hints: dict[str, Any]) -> RecipeField:
    name = f"{section}.{field.name}" if section else field.name
    default = None if field.default is dataclasses.MISSING else _as_yaml(field.default)
    return RecipeField(name, _values(name, hints[field.name]), default, field_texts(kind)[field.name])


def _values(name: str, hint: Any) -> str:
    if name in NAMES:
        return "one of " + ", ".join(NAMES[name])
    if name == "evaluation.metric":
        return "one of " + ", ".join([*METRICS, f"{LM_EVAL}TASK"])
    if name in RANGES:
        return RANGES[name][1]
    words = {"str": "text", "int": "a whole number", "bool": "true or false"}
    return re.sub(r"\b(str|int|bool)\b", lambda match: words[match[0]], describe(hint))


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def field_texts(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field: entries `name: text`, each on a line of its own."""
    names = {field.name for field in dataclasses.fields(kind)}
    found: dict[str, str] = {}
    name = ""
    for line in "\n".join(_paragraphs(kind)[1:]).splitlines():
        entry = re.fullmatch(r"(\w+): (.*)", line)
        if entry and entry[1] in names:
            name = entry[1]
            found[name] = entry[2]
        elif name:
            found[name] += f" {line.strip()}"
    return found


def _paragraphs(kind: Any) -> list[str]:
    return (inspect.getdoc(kind) or "").split("\n\n")
