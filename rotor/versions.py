"""Versions of rotor and of the libraries that results depend on."""

from __future__ import annotations

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of rotor and of the libraries that compute and store, for run.json and benchmark results."""
    import safetensors
    import torch
    import transformers

    return {
        "rotor": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
