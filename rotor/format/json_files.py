"""JSON as text that every reader takes, and JSON files of unknown origin."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MAX_JSON_BYTES = 1 << 27
"""The index of a model of a million tensors is smaller."""
MAX_JSON_LEVELS = 64
"""Lists and objects within one another: what is deeper would end functions that call themselves on a level each."""


def json_text(data: Any, ensure_ascii: bool = False) -> str:
    """A value as JSON; NaN and Infinity, which JSON has not, are null."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=ensure_ascii, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_regular(path: Path, hint: str = "") -> None:
    """Raises CheckpointError for what is neither file nor folder: opening a pipe would wait for its writer."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(f"{path}: is no regular file.", hint)


def read_json(path: Path, hint: str = "", *, any_names: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        any_names: escaped halves of characters are taken too, which stand for names of files that are not UTF-8.
    Raises:
        CheckpointError: it is missing or not one.
    """
    try:
        check_regular(path, hint)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} of any sensible file.", hint)
        text = path.read_text("utf-8")
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
        if not any_names and "\\ud" in text.lower():  # escaped halves of characters, which no file in UTF-8 can hold
            json.dumps(data, ensure_ascii=False).encode()
        if isinstance(data, dict):
            _check_levels(data)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file.", hint) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: not readable as JSON: {reason}", hint) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}.", hint)
    return data


def _check_levels(data: Any) -> None:
    level = [data]
    for _ in range(MAX_JSON_LEVELS):
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [item for item in level if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"more than {MAX_JSON_LEVELS} levels of lists and objects")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is more than a float holds")
    return value
