"""From spectra to ranks; one method a file."""

from .fisher import FisherPath
from .plan import RankPath, RankPlan, Spectra, round_rank
from .removal_rate import RemovalRatePath, removal_rate_ranks, tail_shares
from .uniform import UniformPath
from .water_filling import Sensitivity, WaterFillingPath

__all__ = [
    "FisherPath",
    "RankPath",
    "RankPlan",
    "RemovalRatePath",
    "Sensitivity",
    "Spectra",
    "UniformPath",
    "WaterFillingPath",
    "removal_rate_ranks",
    "round_rank",
    "tail_shares",
]
