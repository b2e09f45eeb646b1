"""Commands that rotor prints somewhere: found in texts, and checked without being run."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import typer.main

from rotor.cli.commands import app
from rotor.recipe.reading import load_recipe, override
from rotor.recipe.recipe import EXPORT_SECTIONS
from rotor.recipe.requests import Goal
from support.paths import ROOT

NAMES = tuple(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
ANYTHING = "0.5"
"""Stands where a text is filled in: it may be a path, a number or a share."""

PLACES = {"NAME": "fdc", "N": "1", "KEY=VALUE": "tokens.count=1", "HEX": "00", "...": ""}
"""Values of words in capitals where a path would not do."""


def parse(words: list[str]) -> None:
    """Check names, options and values, and that nothing is missing, without running anything."""
    command = typer.main.get_command(app)
    context = command.make_context("rotor", list(words), resilient_parsing=True)
    name, found, rest = command.resolve_command(context, list(words))  # type: ignore[attr-defined]
    assert name is not None
    parameters = found.make_context(name, rest, parent=context).params
    overrides = parameters.get("overrides") or []
    if name == "export":
        goal = ("accuracy", "compression", "removal_rate")
        Goal(**{key: parameters[key] for key in goal})
        override(load_recipe("rotor"), overrides, EXPORT_SECTIONS)
    elif name in ("calibrate", "inspect"):
        named = parameters["recipe"]
        load_recipe("rotor" if named.startswith(ANYTHING) else named, overrides)


def check(command: str) -> None:
    """A name alone, or with options alone, speaks of a command; anything else is one, and has to be whole."""
    words = words_of(command)
    known = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    required = any(parameter.required for parameter in known.params)
    if len(words) > 1 and words[1].startswith("--") and words[1] != "--" and required:
        options = {option for parameter in known.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, command
    elif len(words) > 1:
        parse(words)


def words_of(command: str) -> list[str]:
    """A printed command's words after `rotor`, up to a redirection, with something in the place of its placeholders."""
    words = shlex.split(command.partition(" > ")[0])
    assert words[0] == "rotor", command
    return [known for word in words[1:] if (known := PLACES.get(word, word))]


def strings(path: Path) -> list[str]:
    """The texts in a module, formatted ones with ANYTHING for their values."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(map(_part, node.values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            found.append(node.value)
    return found


def _part(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    assert isinstance(value, ast.FormattedValue)
    source = ast.unparse(value.value)
    return "2" if source.endswith("count") else ANYTHING


def printed_texts() -> dict[str, list[str]]:
    """By file of the package: the texts in it."""
    modules = sorted([*(ROOT / "rotor").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
    pages = sorted((ROOT / "rotor").rglob("*.jinja"))
    found = {str(path.relative_to(ROOT)): strings(path) for path in modules}
    return found | {str(path.relative_to(ROOT)): [path.read_text("utf-8")] for path in pages}


def commands_in(text: str) -> list[str]:
    """Whole commands in a text: between backticks or <code>, or at its beginning or after a colon, to its end."""
    names = "|".join(NAMES)
    quoted = re.findall(rf"(?:`|<code>)(rotor (?:{names})\b[^`<]*)(?:`|</code>)", text)
    bare = re.findall(rf"(?:^|Next: |Example: )(rotor (?:{names})\b.*?)(?:\. |$)", " ".join(text.split()))
    return quoted + bare
