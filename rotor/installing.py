"""How rotor is installed: the words of every error, card and page that says so.

No package index has rotor yet. A name there that nobody owns must not be recommended, since anybody could take it; so
the source is a folder, or git+URL of the repository.
"""

from __future__ import annotations

PACKAGE = "rotor-kv"
"""The name of the distribution, once it is installed."""

SOURCE = "PATH/TO/rotor"
"""What pip is to install from."""


def pip_install(extra: str = "") -> str:
    """The command; `extra` (plots, kernels, eval, peers) names what is wanted beside."""
    return f"pip install '{SOURCE}[{extra}]'" if extra else f"pip install {SOURCE}"
