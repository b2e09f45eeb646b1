"""How rotor is installed: the words of every error, card and page that says so.

No package index has rotor yet. A name there that nobody owns must not be recommended, since anybody could take it; so
the source is the repository that [project.urls] in pyproject.toml names as Repository, and a folder as long as it names
none.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

PACKAGE = "rotor-kv"
"""The name of the distribution, once it is installed."""

FOLDER = "PATH/TO/rotor"
"""What pip is to install from where nothing says where the repository is."""


@cache
def repository() -> str | None:
    """Its URL, if the installed package names one."""
    try:
        urls = metadata(PACKAGE).get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    return next((url for name, _, url in (item.partition(", ") for item in urls) if name == "Repository"), None)


def documentation() -> str:
    """Where it is read: in the checkout that this is, or wherever the sources are."""
    checkout = Path(__file__).parent.parent
    if (checkout / "docs" / "commands.md").is_file():
        return f"{checkout}/docs/commands.md"
    return repository() or f"{FOLDER}/docs/commands.md"


def pip_install(extra: str = "") -> str:
    """The command; `extra` (plots, kernels, eval, peers) names what is wanted beside."""
    url = repository()
    if url is not None:
        return f"pip install '{PACKAGE}{f'[{extra}]' if extra else ''} @ git+{url}'"
    return f"pip install '{FOLDER}[{extra}]'" if extra else f"pip install {FOLDER}"
