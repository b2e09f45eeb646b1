"""How rotor is installed: the words of every error, card and page that says so.

No package index has rotor yet. A name there that nobody owns must not be recommended, since anybody could take it; so
the source is a folder.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = "rotor-kv"
"""The name of the distribution, once it is installed."""

FOLDER = "PATH/TO/rotor"


def documentation() -> str:
    """Where it is read: in the checkout that this is, or wherever the sources are."""
    checkout = Path(__file__).parent.parent
    return f"{checkout if (checkout / 'docs' / 'commands.md').is_file() else FOLDER}/docs/commands.md"


def pip_install(extra: str = "") -> str:
    """The command; `extra` (plots, kernels, eval) names what is wanted beside."""
    return f"pip install '{FOLDER}[{extra}]'" if extra else f"pip install {FOLDER}"
