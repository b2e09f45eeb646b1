"""Register rotor with transformers when that is imported; until then nothing but this is.

Python runs this at its start, in every process of an environment that has rotor: it imports sys alone, and must not
fail.
"""

import sys


class _BeforeTransformers:
    """Finds nothing: it imports rotor, which registers itself, when somebody asks for transformers."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname == "transformers":
            sys.meta_path.remove(_BeforeTransformers)
            try:
                import rotor  # noqa: F401
            except Exception as error:
                import warnings

                message = f"rotor could not be imported, so that transformers loads none of its checkpoints: {error!r}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None


if "transformers" not in sys.modules and "rotor" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTransformers)  # type: ignore[arg-type]
