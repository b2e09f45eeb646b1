"""What a study's recipes measure, by their settings: which of their numbers are alike, and which depend on tokens."""

from __future__ import annotations

from typing import Any

from ..bases.registry import sides_that_read_tokens
from .store import StudyStore

SIDES = ("qk", "vo")


def quantity(store: StudyStore, name: str, side: str) -> str:
    """What the singular values of a recipe or ablation are of; those of different ones belong into different axes."""
    settings = _settings(store, name)
    if not settings:
        return ""
    method = settings["bases"][side]
    shared = " (groups.joint)" if settings["groups"].get("joint") else ""  # of keys and values stacked
    if side == "vo":
        return f"by {method}{shared}"
    where = {"pre": ", before RoPE", "post": ", after RoPE", "block": ", in blocks"}.get(
        settings["groups"]["domain"], ""
    )
    return f"by {method}{where}{shared}"


def token_sides(store: StudyStore, name: str) -> tuple[str, ...]:
    """Sides of a recipe whose bases depend on calibration tokens; others, of the weights alone, need no comparison."""
    settings = _settings(store, name)
    return SIDES if not settings else sides_that_read_tokens(settings["bases"]["qk"], settings["bases"]["vo"])


def _settings(store: StudyStore, name: str) -> dict[str, Any]:
    """Of a recipe or an ablation; nothing where the study does not say."""
    found: dict[str, Any] = {**store.settings.get("recipes", {}), **store.settings.get("ablations", {})}.get(name, {})
    return found
