"""Rank plans, and the ordered path of plans that every method gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ...checkpoint.layout import AttentionShape, LayerRanks, compression
from ..codes.layer import GroupChannels

SideSensitivity = list[tuple[int, float]]
"""Pairs of a rank and the loss per unit of dropped energy when all groups of the layer have that rank, by rising rank.
The loss is KL in nats per token. Empty if no rank drops any energy."""

Sensitivity = tuple[SideSensitivity, SideSensitivity]
"""Sensitivities of a layer's qk and vo."""

COMPRESSION_SLACK = 1e-9
"""Slack in comparing compressions, so that rounding errors do not decide."""


@dataclass(frozen=True)
class Spectra:
    """Singular values of a layer, each [num_groups, columns], descending."""

    qk: Tensor
    vo: Tensor


@dataclass(frozen=True)
class RankPlan:
    """The ranks of every layer's groups.

    parameter: value of the method's parameter (the removal rate, a price, a share).
    exact, rounded: ranks from the method, and ranks as stored.
    planned, stored: compression (share of the KV cache removed) with the exact and the rounded ranks.
    channels: coded channels of each layer's groups, None for a plan of ranks; with codes a rank counts the channels of
        any width.
    """

    parameter: float
    exact: list[LayerRanks]
    rounded: list[LayerRanks]
    planned: float
    stored: float
    channels: list[GroupChannels] | None = None


@dataclass(frozen=True)
class RankInputs:
    """Inputs of a method: spectra and sizes of all layers, and measurements for methods that need them.

    multiple_of: stored ranks are multiples of this (or all columns).
    gradients: function that returns for each layer the summed squared gradients of W_k and W_v, each [num_groups].
    sensitivities: sensitivities of each layer.
    context_tokens: length of the sequence whose bytes are counted; None counts all layers alike.
    """

    spectra: Sequence[Spectra]
    shape: AttentionShape
    multiple_of: int
    gradients: Callable[[], Sequence[tuple[Tensor, Tensor]]] = tuple
    sensitivities: Sequence[Sensitivity] = ()
    context_tokens: int | None = None


def round_rank(rank: int, multiple_of: int, columns: int) -> int:
    """Round a rank up to a multiple, but never beyond the number of columns."""
    return min(-(-rank // multiple_of) * multiple_of, columns)


class RankPath(ABC):
    """All plans that a method can give for a model, ordered by stored compression."""

    granularity: tuple[str, str]
    """Words for messages: the unit of plans, and a hint how to make it finer."""

    @abstractmethod
    def _plans(self) -> list[RankPlan]:
        """List every plan of the method, mildest first; duplicates allowed."""

    @cached_property
    def _distinct_plans(self) -> list[RankPlan]:
        distinct: dict[float, RankPlan] = {}
        for plan in self._plans():
            distinct.setdefault(round(plan.stored, 9), plan)
        return [distinct[key] for key in sorted(distinct)]

    def plans(self) -> list[RankPlan]:
        """List one plan for each distinct compression, rising; the mildest parameter of each."""
        return self._distinct_plans

    def at_compression(self, target: float) -> RankPlan | None:
        """The mildest plan that removes at least `target` of the cache, or None."""
        return next((plan for plan in self.plans() if plan.stored >= target - COMPRESSION_SLACK), None)

    def lighter(self, plan: RankPlan) -> list[RankPlan]:
        """Plans off the path that store one unit less than `plan`, the most promising first; none by default."""
        del plan
        return []


class SpectraPath(RankPath):
    """Path of rank plans from singular values."""

    def __init__(self, inputs: RankInputs) -> None:
        self.inputs = inputs
        self.spectra = list(inputs.spectra)
        self.shape = inputs.shape
        self.multiple_of = inputs.multiple_of
        self.columns = inputs.spectra[0].qk.shape[-1]
        self.granularity = f"ranks in multiples of {self.multiple_of}", "lower it with --set ranks.multiple_of=8"

    def _make(self, parameter: float, exact: list[LayerRanks]) -> RankPlan:
        """Make a plan: round its ranks and count its compression."""
        rounded = [
            [
                (round_rank(qk, self.multiple_of, self.columns), round_rank(v, self.multiple_of, self.columns))
                for qk, v in ranks
            ]
            for ranks in exact
        ]
        planned, stored = (compression(ranks, self.shape, self.inputs.context_tokens) for ranks in (exact, rounded))
        return RankPlan(parameter, exact, rounded, planned, stored)
