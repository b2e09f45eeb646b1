"""How rotor is installed: the words of every error, card and page that says so.

No package index has rotor yet. A name there that nobody owns must not be recommended, since anybody could take it: the
source is a folder.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = "rotor-kv"
"""The name of the distribution, once it is installed."""

FOLDER = "PATH/TO/rotor"
"""Stands for a clone of the repository."""


def documentation() -> str:
    """Where the documentation is: in the checkout that this is, or wherever the sources are."""
    page = Path(__file__).parent.parent / "docs" / "commands.md"
    return str(page) if page.is_file() else f"{FOLDER}/docs/commands.md"


def pip_install(extra: str = "") -> str:
    """The command; `extra` (plots, kernels, eval, peers) names what is wanted beside."""
    return f"pip install '{FOLDER}[{extra}]'" if extra else f"pip install {FOLDER}"
