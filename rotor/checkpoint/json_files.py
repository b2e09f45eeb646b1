"""JSON as text that every reader takes, and JSON files of unknown origin."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ..checked import JsonObject
from ..errors import CheckpointError

MAX_JSON_BYTES = 1 << 27
"""Largest JSON file that is read; the index of a model with a million tensors is smaller."""


def json_text(data: object) -> str:
    """A value as JSON in ASCII; NaN and Infinity, which JSON lacks, become null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, hint: str = "") -> JsonObject:
    """Read a JSON object from a file; raises CheckpointError where it is missing or not one."""
    if not path.is_file():  # a pipe would wait for its writer
        raise CheckpointError(f"{path}: no such file.", hint)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} of any sensible file.", hint)
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: not readable as JSON: {reason}", hint) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}.", hint)
    return data
