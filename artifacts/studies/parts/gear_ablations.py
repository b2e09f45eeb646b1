"""The part `gear-ablations` of a study: GEAR's ablations at 2 bits, and its tables 8 and 10 in shape.

rotor study MODEL --parts artifacts/studies/parts/gear_ablations.py:Ablations -o STUDY
"""

from __future__ import annotations

from dataclasses import replace

from rotor.policies import GEAR, H2O, KIVI, Policy
from rotor.tools.study.cache_part import CONTROL, GROUP, CachePart, StudiedCache
from rotor.tools.study.context import StudyContext

ABLATED = {"sparsity": (0.01, 0.05, 0.1), "rank": (0, 2, 8), "loops": (1, 4)}
"""Other values of GEAR's parameters (GEAR figure 4a)."""


class Ablations(CachePart):
    name = "gear-ablations"
    title = "GEAR's parts at 2 bits (figures 4a and 4b, tables 8 and 10)"
    text = (
        "All on KIVI with groups and a buffer of 64. Table 8: KIVI, outliers alone, GEAR-L, GEAR. Figure 4b: what is "
        "lost is made up for nowhere (KIVI), in the prompt alone, everywhere. Table 10: H2O at half of the tokens "
        "beside GEAR with 4 bits on KCVT."
    )

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        del study
        return CONTROL | {name: StudiedCache(policy.method, policy) for name, policy in gears().items()}


def gears() -> dict[str, Policy]:
    """GEAR without its parts, with other parameters, and what it is compared with."""
    gear = GEAR(2, backbone="kivi", buffer=GROUP, group=GROUP)
    found: dict[str, Policy] = {
        "KIVI-2": KIVI(2, GROUP, GROUP),
        "outliers alone": replace(gear, rank=0, new_rank=0),
        "GEAR-L": replace(gear, sparsity=0.0),
        "GEAR-L in the prompt": replace(gear, sparsity=0.0, new_rank=0),
        "GEAR": gear,
        "GEAR in the prompt": replace(gear, new_rank=0),
        "GEAR KCVT-2": GEAR(2),
        "GEAR KCVT-4": GEAR(4),
        "H2O, 0.5 of the tokens": H2O(0.5),
    }
    for name, values in ABLATED.items():
        for value in values:
            found[f"GEAR, {name} {value:g}"] = replace(gear, **{name: value})  # type: ignore[arg-type]
    return found
