"""The reference of a recipe's fields, from their types and texts: as docs/recipes.md, and as data."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..checked import JsonObject, in_words, options
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
    (whole,) = options(Recipe)
    sections = {name: options(Recipe, [name])[0] for name in whole["properties"]}
    fields_by_section = {"": [_field(name) for name, section in sections.items() if "properties" not in section]}
    for name, section in sections.items():
        if "properties" in section:
            fields_by_section[name] = [_field(name, field) for field in section["properties"]]
    return fields_by_section


def reference_page() -> str:
    """All fields as a page of Markdown."""
    lines = [HEAD.format(sections=", ".join(f"`{name}`" for name in EXPORT_SECTIONS))]
    for section, fields in recipe_fields().items():
        (schema,) = options(Recipe, [section] if section else [])
        lines += [f"## {section or 'The recipe'}", "", schema["description"], ""]
        lines += ["| field | values | default | what it is |", "|---|---|---|---|"]
        lines += [*(f"| {' | '.join(_cells(field))} |" for field in fields), ""]
    return "\n".join(lines).rstrip()


def _cells(field: RecipeField) -> list[str]:
    default = "" if field.default is None else f"`{field.default}`"
    return [f"`{field.name}`", *(text.replace("|", r"\|") for text in (field.values, default, field.text))]


def _field(*path: str) -> RecipeField:
    *above, name = path
    schema: JsonObject = options(Recipe, above)[0]["properties"][name]
    may_be = options(Recipe, path)
    default = None if "default" not in schema else json.dumps(schema["default"]).strip('"')
    text = " ".join(schema["description"].split())
    return RecipeField(".".join(path), " or ".join(map(in_words, may_be)), default, text)
