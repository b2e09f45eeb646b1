"""All commands, in the order in which `rotor --help` lists them."""

from __future__ import annotations

from . import checkpoints, gpu, models, running, speed, studies
from .app import app

__all__ = ["app", "checkpoints", "gpu", "models", "running", "speed", "studies"]
