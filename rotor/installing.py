"""Installation of rotor, in the words that every error, model card and page uses.

No package index has rotor yet. Nobody owns its name there, so anybody could publish under it; the instructions name a
source folder instead.
"""

from __future__ import annotations

from pathlib import Path

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
