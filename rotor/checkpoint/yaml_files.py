"""YAML of unknown origin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..errors import RecipeError

MAX_CHARACTERS = 1 << 18


def read_text(path: Path, where: str) -> str:
    """Read a text file that a user named; raises RecipeError if it cannot be read or is not text."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{where}: cannot be read ({' '.join(str(error).split())}).", "Give a YAML file in UTF-8."
        ) from error


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML without aliases, which can make a short text describe a huge value.

    Raises:
        RecipeError: too long, not valid, or with an alias.
    """
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"{where}: {len(text)} characters, more than the {MAX_CHARACTERS} of any sensible file.")
    try:
        return yaml.load(text, _PlainLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError, TypeError, AttributeError) as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


class _PlainLoader(yaml.SafeLoader):
    """Loads YAML without aliases; 1e-3 and 4.8e12 are numbers, as in YAML 1.2 and everywhere else."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(f"an alias (*name) in line {mark.line + 1}; write the value out")
        return super().compose_node(parent, index)


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
