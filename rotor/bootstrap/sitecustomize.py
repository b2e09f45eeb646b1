"""Runs at the start of every Python process below `rotor run`, then whatever sitecustomize stands behind it."""

import importlib.machinery
import importlib.util
import os
import sys

import rotor_autoload  # type: ignore[import-not-found]  # noqa: F401  (beside this file, whose folder is on sys.path)

_HERE = os.path.dirname(os.path.abspath(__file__))
_behind = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
)
if _behind is not None and _behind.loader is not None:
    _module = importlib.util.module_from_spec(_behind)
    sys.modules["sitecustomize"] = _module
    _behind.loader.exec_module(_module)
