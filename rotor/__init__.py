"""rotor shrinks the KV cache of a decoder-only language model along its hidden dimension, at a stated accuracy.

Importing it lets `AutoModelForCausalLM.from_pretrained` load what `rotor export` wrote. `rotor.calibrate`,
`rotor.export` and `rotor.validate` do what the commands do; `rotor.inspect` and `rotor.study` too.
"""

from __future__ import annotations

from pathlib import Path

# In a source checkout kernels/ and recipes/ lie beside this folder; an installed rotor has them inside it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"

# Each of these functions takes its module's place as an attribute of the package, so they are imported here and not
# when they are first asked for.
from .calibrate import calibrate
from .errors import RotorError
from .export import ExportResult, export
from .inspection import Inspection, inspect
from .integration import register
from .progress import Progress
from .run import Run
from .study import Study, study
from .validate import Validation, validate

__all__ = [
    "ExportResult",
    "Inspection",
    "Progress",
    "RotorError",
    "Run",
    "Study",
    "Validation",
    "__version__",
    "calibrate",
    "export",
    "inspect",
    "study",
    "validate",
]

register()
