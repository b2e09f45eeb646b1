"""All commands, in the order in which `rotor --help` lists them."""

from __future__ import annotations

from . import checkpoints, models, speed, studies
from .app import app

__all__ = ["app", "checkpoints", "models", "speed", "studies"]
