"""`budgets`: budgets of layers for methods that drop tokens: alike, and by SqueezeAttention."""

from __future__ import annotations

from dataclasses import replace

from ...policies import Eviction
from ..cache_part import CONTROL, CachePart, StudiedCache, evictions
from ..context import StudyContext

METHODS = ("window", "StreamingLLM", "H2O", "random")
"""Those of SqueezeAttention's table 2, and the control."""


class Budgets(CachePart):
    name = "budgets"
    title = "Budgets of layers (SqueezeAttention figure 3)"
    text = (
        "Shares of all tokens of a row. SqueezeAttention's number is what the layers of its third group keep of their "
        "budget: 0.8 to 0.9 by its text, which removes 0.1 to 0.2; 0.1 to 0.2 by its Algorithm 1, which multiplies by "
        "p (`--set study.squeeze=[0.85,0.15]`)."
    )

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        found = dict(CONTROL)
        for share in study.plan.settings.budgets:
            for name, policy in _methods(share).items():
                found[of_budget(name, "alike", share)] = StudiedCache(name, policy)
                for p in study.plan.settings.squeeze:
                    how = f"SqueezeAttention {p:g}"
                    found[of_budget(name, how, share)] = StudiedCache(name, replace(policy, squeeze=p))
        return found


def of_budget(name: str, how: str, share: float) -> str:
    """The name of a record."""
    return f"{name}, {how}, {share:g} of the tokens"


def _methods(share: float) -> dict[str, Eviction]:
    found = evictions(share)
    return {name: found[name] for name in METHODS}
