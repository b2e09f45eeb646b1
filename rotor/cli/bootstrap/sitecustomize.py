"""Runs at the start of every Python process below `rotor run`, then whatever sitecustomize stands behind it."""

import importlib.machinery
import importlib.util
import os
import sys

import rotor_autoload  # type: ignore[import-not-found]  # noqa: F401  (beside this file, whose folder is on sys.path)

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROTOR = os.path.dirname(os.path.dirname(_HERE))


class _ThisRotor:
    """The rotor that `rotor run` belongs to, for a process that finds none: of a source tree that is not installed."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "rotor":
            return None
        file = os.path.join(_ROTOR, "__init__.py")
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[_ROTOR])


sys.meta_path.append(_ThisRotor)  # type: ignore[arg-type]
_behind = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
)
if _behind is not None and _behind.loader is not None:
    _module = importlib.util.module_from_spec(_behind)
    sys.modules["sitecustomize"] = _module
    _behind.loader.exec_module(_module)
