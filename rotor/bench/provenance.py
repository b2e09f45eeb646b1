"""Provenance of a recorded number: date, command, versions, and the commit of the package."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..versions import versions


def provenance(command: str) -> dict[str, Any]:
    """Describe what made a measurement, for its record.

    Args:
        command: as the user gave it.
    """
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": command,
        "versions": {**versions(), "triton": _triton_version(), "python": platform.python_version()},
        "commit": package_commit(),
    }


def package_commit() -> str | None:
    """The commit of the checkout that this package runs from, with `-dirty` if files differ; None if it is none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    call = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(call, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _triton_version() -> str | None:
    """None where it is not installed under this name; AMD's and others' builds have other ones."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None
