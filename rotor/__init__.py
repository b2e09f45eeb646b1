"""rotor shrinks the KV cache of a decoder-only language model along its hidden dimension, at a stated accuracy.

Importing it lets `AutoModelForCausalLM.from_pretrained` load what `rotor export` wrote.
"""

from __future__ import annotations

from pathlib import Path

# In a source checkout kernels/ and recipes/ lie beside this folder; an installed rotor has them inside it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

from .errors import RotorError
from .integration import register

__version__ = "0.1.0"
__all__ = ["RotorError", "__version__"]

register()
