"""A recipe: all that decides the result of a run, apart from the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import yaml
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from ..allocation.registry import CHOOSING, OF_ONE_WIDTH, Need
from ..bases.registry import QK_METHODS
from ..checked import Unfit
from ..format.channels import WIDTHS
from .sections import (
    MODEL,
    Bases,
    CacheSettings,
    Codes,
    Evaluation,
    Groups,
    ObjectiveSettings,
    Prune,
    Ranks,
    Search,
    Tokens,
)

EXPORT_SECTIONS = ("ranks", "codes", "evaluation", "search", "objective", "cache")
"""Sections that may still be overridden on export, because calibration does not depend on them."""


@dataclass(frozen=True, config=MODEL)
class Recipe:
    """All that decides the result of a run, apart from the model."""

    name: str
    """What the recipe is called."""
    summary: str
    """What it is, in a sentence."""
    tokens: Tokens = Tokens()
    prune: Prune = Prune()
    groups: Groups = Groups()
    bases: Bases = Bases()
    ranks: Ranks = Ranks()
    codes: Codes = Codes()
    evaluation: Evaluation = Evaluation()
    search: Search = Search()
    objective: ObjectiveSettings = ObjectiveSettings()
    cache: CacheSettings = CacheSettings()

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

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        """What fields ask of each other."""
        for name, fits, expected in CONDITIONS:
            if not fits(self):
                raise Unfit(name, attrgetter(name)(self), expected(self))
        return self


def _qk_methods(recipe: Recipe) -> list[str]:
    """Query/key bases that work wherever the recipe may compress keys, on a model with RoPE."""
    domain = recipe.groups.domain
    domains = {"pre", "post"} if domain == "any" else {"pre" if domain == "block" else domain}
    return [name for name, method in QK_METHODS.items() if domains <= set(method.domains)]


CONDITIONS: tuple[tuple[str, Callable[[Recipe], bool], Callable[[Recipe], str]], ...] = (
    (
        "tokens.path",
        lambda r: r.tokens.source != "text" or bool(r.tokens.path),
        lambda r: "a file or folder, as source is text",
    ),
    (
        "tokens.dataset",
        lambda r: r.tokens.source != "dataset" or bool(r.tokens.dataset),
        lambda r: "a name on the hub or a folder, as source is dataset",
    ),
    (
        "evaluation.path",
        lambda r: r.evaluation.source != "text" or bool(r.evaluation.path),
        lambda r: "a file or folder, as source is text",
    ),
    (
        "ranks.method",
        lambda r: r.coded or r.ranks.rule.chooses or not r.groups.left_open,
        lambda r: f"{CHOOSING}, as only it, or bits of codes, chooses where groups says any, or auto of fast_planes",
    ),
    (
        "ranks.rows",
        lambda r: not r.ranks.uniform_rows or r.coded or r.ranks.rule.uniform_rows,
        lambda r: f"ragged, as ranks.method is {r.ranks.method}: {OF_ONE_WIDTH}, or bits of codes, can do uniform",
    ),
    (
        "ranks.rows",
        lambda r: not r.ranks.uniform_rows or r.objective.weight == 0,
        lambda r: f"ragged, as objective.kind is {r.objective.kind}: of uniform rows bytes are what is saved",
    ),
    (
        "bases.qk",
        lambda r: r.bases.qk in _qk_methods(r),
        lambda r: f"one of {', '.join(_qk_methods(r))}, as groups.domain is {r.groups.domain}",
    ),
)
"""The field that is named, whether it fits, and what was expected of it."""
