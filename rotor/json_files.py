"""Read JSON files of unknown origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError

MAX_JSON_BYTES = 1 << 27
"""The index of a model of a million tensors is smaller."""


def read_json(path: Path, hint: str = "") -> dict[str, Any]:
    """Read a JSON object from a file; raises CheckpointError if it is missing or not one."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} of any sensible file.", hint)
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file.", hint) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: not readable as JSON: {reason}", hint) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}.", hint)
    return data
