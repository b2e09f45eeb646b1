"""Register rotor with transformers when that is imported; until then nothing but this is.

Python runs this at its start, in every process of an environment that has rotor: it imports sys alone, and must not
fail.
"""

import sys


class _WithTransformers:
    """Finds transformers as the others do, and lets rotor, which registers itself, be imported right before it."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is not None:

            def import_rotor_and_execute(module):  # type: ignore[no-untyped-def]
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)  # type: ignore[arg-type]
                _import_rotor()
                execute(module)

            spec.loader.exec_module = import_rotor_and_execute  # type: ignore
        return spec


def _import_rotor():  # type: ignore[no-untyped-def]
    """Import rotor, never another program's module of that name; whatever happens, transformers is imported."""
    import importlib.util
    import os
    import warnings

    try:
        spec = importlib.util.find_spec("rotor")
        places = [*(spec.submodule_search_locations or ()), str(spec.origin)] if spec else ["nowhere"]
        if not any(os.path.isfile(os.path.join(place, "cli", "bootstrap", "rotor_autoload.py")) for place in places):
            raise ImportError(f"the module rotor is {places[0]} here, which hides the package rotor-kv")
        import rotor  # noqa: F401
    except Exception as error:
        message = f"rotor could not be imported, so that transformers loads none of its checkpoints: {error!r}"
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors here, which this is none of
            sys.stderr.write(f"{message}\n")


if "transformers" not in sys.modules and "rotor" not in sys.modules:
    sys.meta_path.insert(0, _WithTransformers)  # type: ignore[arg-type]
