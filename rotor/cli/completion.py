"""What the shell completes: names of recipes, settings, devices. It runs at a keypress, and imports nothing large.

Typer keeps those that begin with what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources


def bundled(folder: str = "") -> list[str]:
    """Names of the bundled recipes, or cache policies."""
    files = (resources.files("rotor.recipes") / folder).iterdir()
    return sorted(file.name[:-5] for file in files if file.name.endswith(".yaml"))


def settings(incomplete: str) -> list[str]:
    """Fields of a recipe as `section.field=`; after the sign the values that are names."""
    name, equals, _ = incomplete.partition("=")
    found = recipe_settings()
    return [f"{name}={choice}" for choice in found.get(name, ())] if equals else [f"{field}=" for field in found]


def recipe_settings() -> dict[str, tuple[str, ...]]:
    """Every `section.field` of a recipe with the names that it may be."""
    from ..recipe.reference import recipe_fields

    return {field.name: field.choices for section, fields in recipe_fields().items() if section for field in fields}


def after_commas(incomplete: str) -> list[str]:
    """Of several recipes with commas, the last."""
    before, comma, _ = incomplete.rpartition(",")
    return [before + comma + name for name in bundled()]


def target_devices() -> list[str]:
    """Devices that decode time can be predicted for."""
    import yaml

    return [*yaml.safe_load((resources.files("rotor.prediction") / "devices.yaml").read_text("utf-8"))]


OF_OPTION: dict[str, Callable[..., list[str]]] = {
    "recipe": lambda: bundled(),
    "recipes": after_commas,
    "show": lambda: [*bundled(), *bundled("cache")],
    "overrides": settings,
    "cache": lambda: ["none", *bundled("cache")],
    "device": lambda: ["auto", "cpu", "cuda", "cuda:0"],
    "dtype": lambda: ["auto", "float32", "bfloat16", "float16"],
    "offload": lambda: ["auto", "always", "never"],
    "target_device": target_devices,
}
"""By the name of the parameter."""
