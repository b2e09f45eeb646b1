"""What the shell completes: names of recipes, settings, devices. It runs at a keypress, and imports nothing large."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources

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
    """Every `section.field` of a recipe with the names that it may be."""
    from ..recipe.reference import recipe_fields

    return {field.name: field.choices for section, fields in recipe_fields().items() if section for field in fields}
