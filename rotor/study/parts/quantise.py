"""`quantise`: quantisers of the cache as GEAR's tables 1, 2 and 8 compare them, KVQuant, and GEAR's ablations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...policies import FP8, GEAR, KCVT, KIVI, KVQuant, PerToken, Policy
from ..cache_part import GROUP, CachePart
from ..context import StudyContext
from ..part import Task

ABLATED = {"sparsity": (0.01, 0.05, 0.1), "rank": (0, 2, 8), "buffer": (10, 40), "loops": (1, 4)}
"""Other values of GEAR's parameters, at 2 bits (GEAR figure 4a)."""


class Quantise(CachePart):
    name = "quantise"
    title = "Quantised caches"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        return self.of_policies(study, quantisers())


def quantisers() -> dict[str, Policy]:
    """At 4 and 2 bits; at 2 GEAR's ablations."""
    found: dict[str, Policy] = {}
    for bits in (4, 2):
        found |= {
            f"per token, {bits} bits": PerToken(bits, GROUP),
            f"KCVT-{bits}": KCVT(bits),
            f"KIVI-{bits}": KIVI(bits, GROUP, GROUP),
            f"KVQuant-{bits}": KVQuant(bits),
            f"GEAR-L KCVT-{bits}": GEAR(bits, sparsity=0.0),
            f"GEAR KCVT-{bits}": GEAR(bits),
            f"GEAR-L KIVI-{bits}": GEAR(bits, backbone="kivi", buffer=GROUP, sparsity=0.0),
            f"GEAR KIVI-{bits}": GEAR(bits, backbone="kivi", buffer=GROUP),
        }
    found["Outlier-A. KIVI-2"] = GEAR(2, backbone="kivi", buffer=GROUP, rank=0, new_rank=0)
    found["GEAR-L prefill KCVT-2"] = GEAR(2, sparsity=0.0, new_rank=0)
    found["fp8"] = FP8("token")
    for name, values in ABLATED.items():
        for value in values:
            found[f"GEAR KCVT-2, {name} {value:g}"] = replace(GEAR(2), **{name: value})  # type: ignore[arg-type]
    return found
