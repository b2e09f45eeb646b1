"""The paths of the methods of ranks that a recipe may name."""

from __future__ import annotations

from .fisher import FisherPath
from .plan import SpectraPath
from .removal_rate import RemovalRatePath
from .uniform import UniformPath
from .water_filling import WaterFillingPath

PATHS: dict[str, type[SpectraPath]] = {
    "removal-rate": RemovalRatePath,
    "uniform": UniformPath,
    "fisher": FisherPath,
    "global": WaterFillingPath,
}
"""Functions by the names of `recipe/rank_methods.py`, which says what they do."""
