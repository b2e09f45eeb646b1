"""What the shell completes: names of recipes, settings, devices. It runs at a keypress, and imports nothing large."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from pathlib import Path

OBJECTIVES = ("memory", "latency")
DEVICES = ("auto", "cpu", "cuda", "cuda:0")


def recipe_names(incomplete: str) -> list[str]:
    """Bundled recipes; of several with commas, the last."""
    before, comma, last = incomplete.rpartition(",")
    folder = resources.files("rotor.recipes")
    names = sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))
    return [before + comma + name for name in _starting(names, last)]


def cache_policies(incomplete: str) -> list[str]:
    """`none`, and bundled cache policies."""
    folder = resources.files("rotor.recipes") / "cache"
    return _starting(["none", *sorted(item.name.removesuffix(".yaml") for item in folder.iterdir())], incomplete)


def settings(incomplete: str) -> list[str]:
    """Fields of a recipe as `section.field=`; after the sign the values that are names."""
    name, equals, value = incomplete.partition("=")
    if not equals:
        return _starting([f"{name}=" for name in recipe_settings()], incomplete)
    return [f"{name}={choice}" for choice in _starting(recipe_settings().get(name, ()), value)]


def objectives(incomplete: str) -> list[str]:
    return _starting(OBJECTIVES, incomplete)


def devices(incomplete: str) -> list[str]:
    return _starting(DEVICES, incomplete)


def target_devices(incomplete: str) -> list[str]:
    """Devices that decode time can be predicted for."""
    import yaml

    text = (resources.files("rotor.prediction") / "devices.yaml").read_text("utf-8")
    return _starting(yaml.safe_load(text), incomplete)


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A completion of these names."""
    known = tuple(names)
    return lambda incomplete: _starting(known, incomplete)


def _starting(names: Iterable[str], start: str) -> list[str]:
    return [name for name in names if name.startswith(start)]


@cache
def recipe_settings() -> dict[str, tuple[str, ...]]:
    """Every `section.field` of a recipe with the names that it may be, read from the source of the dataclasses.

    Importing these would bring torch, which takes seconds.
    """
    package = Path(__file__).parent.parent / "recipe"
    sections = {
        node.name: _fields(node)
        for node in ast.parse((package / "sections.py").read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    (recipe,) = (
        node
        for node in ast.parse((package / "recipe.py").read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "Recipe"
    )
    return {
        f"{node.target.id}.{name}": choices
        for node in recipe.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        for name, choices in sections.get(ast.unparse(node.annotation), {}).items()
    }


def _fields(section: ast.ClassDef) -> dict[str, tuple[str, ...]]:
    """Names of a dataclass's fields, with the texts in their annotations: those of a Literal."""
    return {
        node.target.id: tuple(
            part.value
            for part in ast.walk(node.annotation)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
        for node in section.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
