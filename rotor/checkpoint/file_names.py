"""Names of the files of a run, and of those that an export adds to the model's."""

from __future__ import annotations

INFO = "run.json"
"""Record of a calibration: see rotor.checkpoint.schemas.RunInfo."""

ROTOR_JSON = "rotor.json"
"""Record of what was done, measured and written: see rotor.checkpoint.schemas.CheckpointInfo."""

KERNEL_CONFIG = "kernel_config.json"
RECIPE = "recipe.yaml"
CARD = "README.md"

RESULTS = "results.json"
