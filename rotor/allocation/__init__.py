"""Methods that turn spectra into ranks; one a file, registered by its METHOD there."""

from . import fisher, removal_rate, uniform, water_filling
from .bits import BitsPath
from .fisher import FisherPath
from .plan import Cost, GroupCost, RankInputs, RankMethod, RankPath, RankPlan, Sensitivity, Spectra, round_rank
from .priced_bits import PricedBitsPath
from .removal_rate import RemovalRatePath, removal_rate_ranks, tail_shares
from .uniform import UniformPath
from .water_filling import WaterFillingPath

RANK_METHODS = {m.name: m for m in (removal_rate.METHOD, uniform.METHOD, fisher.METHOD, water_filling.METHOD)}
"""By the names that `ranks.method` may have."""

CHOOSING = ", ".join(name for name, method in RANK_METHODS.items() if method.chooses)
"""Names of those that choose domain and group size too, for messages."""

__all__ = [
    "CHOOSING",
    "RANK_METHODS",
    "BitsPath",
    "Cost",
    "FisherPath",
    "GroupCost",
    "PricedBitsPath",
    "RankInputs",
    "RankMethod",
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
