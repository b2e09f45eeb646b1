"""Register rotor's checkpoints with transformers, without importing it before a model is loaded."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


LOADING = ("transformers.modeling_utils", "transformers.quantizers")
"""The modules of `from_pretrained` and of quantisation configs: whoever loads a model, or reads its config before,
has imported one of them."""


class CachePolicies(Protocol):
    """Part of `rotor.policies` that loading a checkpoint with a cache policy needs."""

    def read_stored(self, section: object, /) -> Any:
        """Read the policy that a checkpoint's config names."""

    def attach_stored(self, model: PreTrainedModel, network: nn.Module, policy: Any, /) -> None:
        """Give it to the model."""


find_policies: Callable[[], CachePolicies]
"""Imports cache policies, which are above this package; called for the first checkpoint that has one."""


def register_with_transformers(policies: Callable[[], CachePolicies]) -> None:
    """Register at once if transformers can load models already, else as soon as it can.

    Args:
        policies: see `find_policies`.
    """
    global find_policies
    find_policies = policies
    if any(name in sys.modules for name in LOADING):
        _register()
    elif not any(isinstance(finder, _AfterLoading) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterLoading())


def _register() -> None:
    """Register; warn, don't raise, on an incompatible transformers, so that other models still load."""
    try:
        from . import integration  # noqa: F401
    except Exception as error:
        message = f"transformers loads no checkpoint of rotor's, which could not be registered with it: {error!r}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class _AfterLoading(MetaPathFinder):
    """Import hook that registers rotor after either module of LOADING was imported.

    One of them imports the other; registration follows the one that ends last.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LOADING:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if any(_is_being_imported(name) for name in LOADING if name != fullname):
                return
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()  # harmless if registration itself imports transformers now

        loader.exec_module = execute_and_register
        return spec


def _is_being_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and getattr(module.__spec__, "_initializing", False)
