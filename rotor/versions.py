"""Versions of rotor and of the libraries that results depend on, and how rotor is installed.

No package index has rotor yet. Nobody owns its name there, so anybody could publish under it; the instructions name a
source folder instead.
"""

from __future__ import annotations

from pathlib import Path

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


PACKAGE = "rotor-kv"
"""Name of the installed distribution."""

FOLDER = "PATH/TO/rotor"


def documentation() -> str:
    """Path of the documentation: in this checkout, else relative to a placeholder for the sources."""
    checkout = Path(__file__).parent.parent
    return f"{checkout if (checkout / 'docs' / 'commands.md').is_file() else FOLDER}/docs/commands.md"


def pip_install(extra: str = "") -> str:
    """The pip command, with an optional extra (plots, kernels, eval)."""
    return f"pip install '{FOLDER}[{extra}]'" if extra else f"pip install {FOLDER}"
