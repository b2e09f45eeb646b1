"""Make transformers know rotor's checkpoints, without importing transformers for those who do not load models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LOADING = "transformers.modeling_utils"
"""The module of `from_pretrained`: whoever loads a model has imported it."""


def register_with_transformers() -> None:
    """Register now, if transformers can load models already; else as soon as it can."""
    if LOADING in sys.modules:
        importlib.import_module("rotor.runtime.integration")
    elif not any(isinstance(finder, _AfterLoading) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterLoading())


class _AfterLoading(MetaPathFinder):
    """Finds one module as Python would have, and lets rotor.integration follow its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LOADING:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(
                "rotor.runtime.integration"
            )  # harmless if that is what imports transformers just now

        loader.exec_module = execute_and_register
        return spec
