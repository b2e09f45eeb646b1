"""All commands, in the order in which `rotor --help` lists them."""

from __future__ import annotations

from . import checkpoints, models, running, speed, speed_measured, studies
from .app import app

__all__ = ["app", "checkpoints", "models", "running", "speed", "speed_measured", "studies"]
