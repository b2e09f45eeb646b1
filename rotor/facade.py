"""Facades of packages whose modules are imported when something of them is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def importing(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package that offers names of its modules.

    Args:
        package: its `__name__`. modules: the module of each name, relative to the package.
    """

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{modules[name]}", package), name)

    return get
