"""What the shell completes: names of recipes, settings, devices. It runs at a keypress, and imports nothing large."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import resources

Completion = Callable[[str], list[str]]


def one_of(*names: str) -> Completion:
    """A completion of these names."""
    return lambda incomplete: _starting(names, incomplete)


def last_of(complete: Completion) -> Completion:
    """Of several names with commas, the last."""

    def completed(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in complete(last)]

    return completed


def recipe_names(incomplete: str) -> list[str]:
    """Bundled recipes."""
    return _files("", incomplete)


def cache_policies(incomplete: str) -> list[str]:
    """`none`, and bundled cache policies."""
    return [*_starting(["none"], incomplete), *_files("cache", incomplete)]


def settings(incomplete: str) -> list[str]:
    """Fields of a recipe as `section.field=`; after the sign the values that are names."""
    name, equals, value = incomplete.partition("=")
    if not equals:
        return _starting([f"{name}=" for name in recipe_settings()], incomplete)
    return [f"{name}={choice}" for choice in _starting(recipe_settings().get(name, ()), value)]


def target_devices(incomplete: str) -> list[str]:
    """Devices that decode time can be predicted for."""
    import yaml

    text = (resources.files("rotor.prediction") / "devices.yaml").read_text("utf-8")
    return _starting(yaml.safe_load(text), incomplete)


def recipe_settings() -> dict[str, tuple[str, ...]]:
    """Every `section.field` of a recipe with the names that it may be."""
    from ..recipe.reference import recipe_fields

    return {field.name: field.choices for section, fields in recipe_fields().items() if section for field in fields}


def _files(folder: str, start: str) -> list[str]:
    files = (resources.files("rotor.recipes") / folder).iterdir()
    return _starting(sorted(file.name[:-5] for file in files if file.name.endswith(".yaml")), start)


def _starting(names: Iterable[str], start: str) -> list[str]:
    return [name for name in names if name.startswith(start)]


OF_OPTION: dict[str, Completion] = {
    "recipe": recipe_names,
    "recipes": last_of(recipe_names),
    "show": recipe_names,
    "overrides": settings,
    "cache": cache_policies,
    "device": one_of("auto", "cpu", "cuda", "cuda:0"),
    "dtype": one_of("auto", "float32", "bfloat16", "float16"),
    "offload": one_of("auto", "always", "never"),
    "objective": one_of("memory", "latency"),
    "target_device": target_devices,
}
"""By the name of the parameter."""
