"""rotor shrinks the KV cache of a decoder-only language model along its hidden dimension, at a stated accuracy.

Importing it lets `AutoModelForCausalLM.from_pretrained` load what `rotor export` wrote. What the commands do, functions
do, with the same options as keyword arguments:

    rotor.inspect("MODEL")                            what a model is to rotor, and what a recipe takes
    rotor.calibrate("MODEL", "RUN")                   find bases and write a run
    rotor.export("RUN", "OUT", accuracy=0.99)         write a compressed checkpoint
    rotor.materialise("OUT", "FULL")                  write one that was exported without weights with them
    rotor.validate("OUT")                             check one
    rotor.study("MODEL", "STUDY")                     compare recipes
    rotor.use_cache_policy(model, "gear-2")           keep the cache of a loaded model by a policy
    rotor.fit_cache_policy(model, policy, sequences)  fit one that needs samples
    rotor.save_cache(cache, "FILE", model)            write the cache of a loaded checkpoint to a file
    rotor.load_cache("FILE", model)                   bring it back, or the first tokens of it
    rotor.saved_inputs("FILE")                        the token ids and the mask that it was saved with

`help(rotor.export)` describes one of them. Errors are `rotor.RotorError`, with a message and a hint.

The import itself is quick: torch and transformers come with what is used first.

Papers have short names in docstrings, recipes and help; docs/design.md lists them under Sources.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .runtime.registration import register_with_transformers
from .versions import __version__

# In a source checkout kernels/ and recipes/ lie beside this folder; an installed rotor has them inside it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from .calibration.calibrate import calibrate as calibrate
    from .calibration.run import Run as Run
    from .errors import RotorError as RotorError
    from .policies import use_cache_policy as use_cache_policy
    from .policies.fitting import fit_cache_policy as fit_cache_policy
    from .progress import Progress as Progress
    from .runtime.registration import CachePolicies
    from .runtime.saved_cache import load_cache as load_cache
    from .runtime.saved_cache import save_cache as save_cache
    from .runtime.saved_cache import saved_inputs as saved_inputs
    from .search.export.export import ExportResult as ExportResult
    from .search.export.export import export as export
    from .search.export.materialise import materialise as materialise
    from .tools.inspection import Inspection as Inspection
    from .tools.inspection import inspect as inspect
    from .tools.study.study import Study as Study
    from .tools.study.study import study as study
    from .tools.validation.integrity import Validation as Validation
    from .tools.validation.validate import validate as validate

_MODULES = {
    "calibration.calibrate": "calibrate",
    "calibration.run": "Run",
    "errors": "RotorError",
    "policies": "use_cache_policy",
    "policies.fitting": "fit_cache_policy",
    "progress": "Progress",
    "runtime.saved_cache": "load_cache save_cache saved_inputs",
    "search.export.export": "ExportResult export",
    "search.export.materialise": "materialise",
    "tools.inspection": "Inspection inspect",
    "tools.study.study": "Study study",
    "tools.validation.integrity": "Validation",
    "tools.validation.validate": "validate",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    """Import what this package offers when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _policies() -> CachePolicies:
    from . import policies

    return policies


register_with_transformers(_policies)
