"""Metadata of a source model's card that a compressed checkpoint's card has to repeat: its licence."""

from __future__ import annotations

from pathlib import Path

from ...checkpoint.files import MAX_CHARACTERS, read_yaml
from ...errors import RecipeError

REPEATED = ("license", "license_name", "license_link", "language")
"""Fields of a card's metadata that hold for what is made of the model, too."""


def repeated_metadata(folder: Path) -> dict[str, str | list[str]]:
    """The fields of REPEATED in the metadata of a model's README.md; nothing where it has none that can be read."""
    path = folder / "README.md"
    if not path.is_file():
        return {}
    text = path.read_bytes()[:MAX_CHARACTERS].decode("utf-8", "replace")
    begin, separator, rest = text.partition("---\n")
    block, end, _ = rest.partition("\n---")
    if begin.strip() or not separator or not end:
        return {}
    try:
        metadata = read_yaml(block, str(path))
    except RecipeError:
        return {}
    found = metadata if isinstance(metadata, dict) else {}
    return {name: found[name] for name in REPEATED if _is_text(found.get(name))}


def _is_text(value: object) -> bool:
    """Tell whether a value is text, or a list of texts."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, str) and item.isprintable() and len(item) < 200 for item in items)
