"""Versions: rotor's own, and of what results depend on."""

from __future__ import annotations

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Of rotor and of the libraries that compute and store, as run.json and benchmark results keep them."""
    import safetensors
    import torch
    import transformers

    return {
        "rotor": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
