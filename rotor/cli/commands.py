"""All commands, in the order in which `rotor --help` lists them."""

from __future__ import annotations

from . import checkpoints, models, speed, speed_measured, studies
from .app import app

__all__ = ["app", "checkpoints", "models", "speed", "speed_measured", "studies"]
