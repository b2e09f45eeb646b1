"""Names of the files that an export adds to those of the model; a run has a recipe too."""

from __future__ import annotations

ROTOR_JSON = "rotor.json"
"""Record of what was done, measured and written: see rotor.checkpoint.schemas.CheckpointInfo."""

KERNEL_CONFIG = "kernel_config.json"
RECIPE = "recipe.yaml"
CARD = "README.md"

RESULTS = "results.json"
