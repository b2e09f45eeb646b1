"""Texts that tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rotor.models.documents import read_documents


def texts_of(path: Path, tokenizer: Any = None) -> list[str]:
    """The documents of a file or folder."""
    return [text for text, _ in read_documents(path, tokenizer)]
