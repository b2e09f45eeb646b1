"""A recipe: all that decides the result of a run, apart from the model."""

from __future__ import annotations

import dataclasses
import json
from operator import attrgetter

import yaml
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from ..checked import InvalidField, JsonObject
from ..checkpoint.rows import WIDTHS
from .basis_methods import QK_METHODS
from .rank_methods import Need
from .sections import (
    MODEL,
    Bases,
    Codes,
    Evaluation,
    Exact,
    Groups,
    ObjectiveSettings,
    Prune,
    Ranks,
    Search,
    Tokens,
)

EXPORT_SECTIONS = ("ranks", "codes", "exact", "evaluation", "search")
"""Sections that may still be overridden on export, because calibration does not depend on them."""


@dataclass(frozen=True, config=MODEL)
class Recipe:
    """All that decides the result of a run, apart from the model."""

    name: str
    """Name of the recipe."""
    summary: str
    """Description in a sentence."""
    tokens: Tokens = Tokens()
    prune: Prune = Prune()
    groups: Groups = Groups()
    bases: Bases = Bases()
    ranks: Ranks = Ranks()
    codes: Codes = Codes()
    exact: Exact = Exact()
    evaluation: Evaluation = Evaluation()
    search: Search = Search()
    objective: ObjectiveSettings = ObjectiveSettings()

    @property
    def coded(self) -> bool:
        """Tell whether channels are codes, allocated by bits."""
        return any(0 < bits < max(WIDTHS) for bits in self.codes.bits)

    @property
    def joins_latents(self) -> bool:
        """Tell whether keys and values share a latent wherever the model lets them; see Groups.joint."""
        fisher = (self.bases.qk, self.bases.vo) == ("fisher", "fisher")
        return self.groups.joint and self.coded and fisher and not self.bases.refit

    @property
    def needs_gradients(self) -> bool:
        """Tell whether calibration takes gradients by keys and values."""
        return self.coded or any(method.gradients for method in self.bases.methods)

    @property
    def rank_needs(self) -> frozenset[Need]:
        """Needs of the ranks' method; nothing where bits are allocated instead."""
        return frozenset() if self.coded else self.ranks.rule.needs

    def to_dict(self) -> JsonObject:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        plain = json.loads(json.dumps(self.to_dict()))  # with lists for tuples
        return yaml.safe_dump(plain, sort_keys=False, width=120)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        """Check what fields ask of each other."""

        def need(fits: bool, name: str, expected: str) -> None:
            if not fits:
                raise InvalidField(name, attrgetter(name)(self), expected)

        tokens = self.tokens
        evaluation = self.evaluation
        domain = self.groups.domain
        file = "a file or folder, as source is text"
        need(tokens.source != "text" or bool(tokens.path), "tokens.path", file)
        data_set = "a name on the hub or a folder, as source is dataset"
        need(tokens.source != "dataset" or bool(tokens.dataset), "tokens.dataset", data_set)
        for name in ("dataset", "split", "column"):
            default = getattr(Tokens(), name)
            fits = tokens.source == "dataset" or getattr(tokens, name) == default
            need(fits, f"tokens.{name}", f"{json.dumps(default)}, as source is not dataset")
        need(evaluation.source != "text" or bool(evaluation.path), "evaluation.path", file)
        need(bool(self.exact.newest) or not self.exact.first, "exact.first", "0, as exact.newest is 0")
        need(not self.exact.newest or not self.bases.refit, "bases.refit", "false, as exact.newest is not 0")
        where = "pre" if domain == "block" else domain
        methods = [name for name, method in QK_METHODS.items() if where in method.domains]
        need(self.bases.qk in methods, "bases.qk", f"one of {', '.join(methods)}, as groups.domain is {domain}")
        return self
