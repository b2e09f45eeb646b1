"""The part `budgets` of a study: methods that drop tokens, with budgets of layers alike and by SqueezeAttention.

rotor study MODEL --parts artifacts/studies/parts/budgets.py:Budgets -o STUDY
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rotor.policies import H2O, Eviction, Streaming, Window, find_policy
from rotor.tools.study.cache_part import CONTROL, CachePart, StudiedCache
from rotor.tools.study.context import StudyContext

BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.7)
"""Shares of a whole row's tokens that are kept (SqueezeAttention figure 3: 0.1 to 1)."""

SQUEEZE = (0.85, 0.15)
"""Share of their budget that the least important layers keep: by SqueezeAttention's text, which removes 0.1 to 0.2, and
by its Algorithm 1 with that p."""

RANDOM = find_policy(f"{Path(__file__).parents[1] / 'random_tokens.py'}:Random")

METHODS: dict[str, type[Eviction]] = {"window": Window, "StreamingLLM": Streaming, "H2O": H2O, "random": type(RANDOM)}
"""Those of SqueezeAttention's table 2, and the control."""


class Budgets(CachePart):
    name = "budgets"
    title = "Budgets of layers (SqueezeAttention figure 3)"
    text = (
        "Shares of all tokens of a row. SqueezeAttention's number is what the layers of its third group keep of their "
        "budget: 0.8 to 0.9 by its text, which removes 0.1 to 0.2; 0.1 to 0.2 by its Algorithm 1, which multiplies by "
        "p."
    )

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        found = dict(CONTROL)
        for share in BUDGETS:
            for name, method in METHODS.items():
                policy = method(share)
                found[of_budget(name, "alike", share)] = StudiedCache(name, policy)
                for p in SQUEEZE:
                    how = f"SqueezeAttention {p:g}"
                    found[of_budget(name, how, share)] = StudiedCache(name, replace(policy, squeeze=p))
        return found


def of_budget(name: str, how: str, share: float) -> str:
    """The name of a record."""
    return f"{name}, {how}, {share:g} of the tokens"
