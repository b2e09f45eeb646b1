"""A recipe: all that decides the result of a run, apart from the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..allocation.registry import Need
from ..format.channels import WIDTHS
from .sections import Bases, CacheSettings, Codes, Evaluation, Groups, ObjectiveSettings, Ranks, Search, Tokens

EXPORT_SECTIONS = ("ranks", "codes", "evaluation", "search", "objective", "cache")
"""Sections that may still be overridden on export, because calibration does not depend on them."""


@dataclass(frozen=True)
class Recipe:
    """All that decides the result of a run, apart from the model.

    name: what the recipe is called.
    summary: what it is, in a sentence.
    """

    name: str
    summary: str
    tokens: Tokens = field(default_factory=Tokens)
    groups: Groups = field(default_factory=Groups)
    bases: Bases = field(default_factory=Bases)
    ranks: Ranks = field(default_factory=Ranks)
    codes: Codes = field(default_factory=Codes)
    evaluation: Evaluation = field(default_factory=Evaluation)
    search: Search = field(default_factory=Search)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)

    @property
    def coded(self) -> bool:
        """Whether channels are codes, allocated by bits."""
        return any(0 < bits < max(WIDTHS) for bits in self.codes.bits)

    @property
    def joins_latents(self) -> bool:
        """Whether keys and values share a latent wherever the model lets them; see Groups.joint."""
        fisher = (self.bases.qk, self.bases.vo) == ("fisher", "fisher")
        return self.groups.joint and self.coded and fisher and not self.bases.refit

    @property
    def needs_gradients(self) -> bool:
        """Whether calibration takes gradients by keys and values."""
        return self.coded or any(method.gradients for method in self.bases.methods)

    @property
    def rank_needs(self) -> frozenset[Need]:
        """What the ranks' method needs; nothing where bits are allocated instead."""
        return frozenset() if self.coded else self.ranks.rule.needs

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        data = self.to_dict()
        data["ranks"]["probe_shares"] = list(data["ranks"]["probe_shares"])
        data["codes"]["bits"] = list(data["codes"]["bits"])
        return yaml.safe_dump(data, sort_keys=False, width=120)
