"""Rank plans, and the ordered paths of them that every rank method gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from torch import Tensor

from ..codes.layer import GroupChannels
from ..format.channels import Latent
from ..format.layout import AttentionShape, LayerRanks, compression

SideSensitivity = list[tuple[int, float]]
"""(rank, loss per unit of dropped energy when all groups of the layer have that rank), by rising rank; the loss is KL
in nats per token. Empty where no rank drops any energy."""

Sensitivity = dict[str, tuple[SideSensitivity, SideSensitivity]]
"""Of qk and of vo, for each candidate of a layer."""

GroupCost = Callable[[str, Latent, Latent | None], float]
"""(candidate, keys, values or None where these are in the key latent) -> what one group costs under an objective, as a
share of the uncompressed model."""

T = TypeVar("T", covariant=True)

SLACK = 1e-9
"""Slack in comparing compressions, so that rounding errors do not decide."""


class PerCandidate(Protocol[T]):
    """Something of every layer and candidate."""

    def select(self, choice: Sequence[str], channels: list[GroupChannels] | None = None) -> Sequence[T]:
        """Pick that of one candidate of each layer, with its channels where these are codes."""


@dataclass(frozen=True)
class Spectra:
    """Singular values of one candidate of a layer, each [num_groups, columns], descending."""

    qk: Tensor
    vo: Tensor


@dataclass(frozen=True)
class RankPlan:
    """A candidate (form of keys, group size) for every layer, and the ranks of its groups.

    parameter: what the method's knob was (the removal rate, a price, a share).
    choice: key of the candidate of each layer.
    exact, rounded: ranks as the method gives them, and as they are stored.
    planned, stored: compression (share of the KV cache removed) by these.
    saving: share of the objective's cost that is saved by the stored ranks; of bytes, the same as `stored`.
    channels: where they are codes, those of each layer's groups; ranks then count those of any width.
    """

    parameter: float
    choice: tuple[str, ...]
    exact: list[LayerRanks]
    rounded: list[LayerRanks]
    planned: float
    stored: float
    saving: float
    channels: list[GroupChannels] | None = None

    def select(self, them: PerCandidate[T]) -> Sequence[T]:
        """Pick what belongs to the chosen candidate of each layer."""
        return them.select(self.choice, self.channels)


@dataclass(frozen=True)
class RankInputs:
    """Inputs of a method: spectra and sizes of all layers, and what else is measured, where it is asked for.

    spectra: per layer its candidates' spectra by key.
    multiple_of: stored ranks are multiples of this (or all columns).
    squares: a removal rate is a share of squared singular values.
    gradients: per layer the summed squared gradients of W_k and W_v of each group, each [num_groups].
    sensitivities: per layer, by candidate. cost: what is saved.
    """

    spectra: Sequence[dict[str, Spectra]]
    shape: AttentionShape
    multiple_of: int
    squares: bool = False
    gradients: Callable[[], Sequence[tuple[Tensor, Tensor]]] = tuple
    sensitivities: Sequence[Sensitivity] = ()
    cost: Callable[[], GroupCost] | None = None


def round_rank(rank: int, multiple_of: int, columns: int) -> int:
    """Round up to what the kernels' tiles need, but never beyond the columns that there are."""
    return min(-(-rank // multiple_of) * multiple_of, columns)


class RankPath(ABC):
    """Path of all plans that a method can give for a model, ordered by stored compression."""

    step: tuple[str, str]
    """What plans are made of, and what makes that finer: for a message."""

    @abstractmethod
    def _plans(self) -> list[RankPlan]:
        """List every plan of the method, mildest first; duplicates allowed."""

    @cached_property
    def _steps(self) -> list[RankPlan]:
        distinct: dict[float, RankPlan] = {}
        for plan in self._plans():
            distinct.setdefault(round(plan.saving, 9), plan)
        return [distinct[key] for key in sorted(distinct)]

    def steps(self) -> list[RankPlan]:
        """List one plan for each distinct saving, rising; the mildest parameter of each."""
        return self._steps

    def at_compression(self, target: float) -> RankPlan | None:
        """The mildest step that removes at least `target` of the cache, or None if none does."""
        return next((plan for plan in self.steps() if plan.stored >= target - SLACK), None)

    def lighter(self, plan: RankPlan) -> list[RankPlan]:
        """Plans beside the path that store one unit less than `plan`, the most promising first; none by default."""
        del plan
        return []


class SpectraPath(RankPath):
    """Path of plans of ranks, from singular values; methods that do not choose take each layer's only candidate."""

    def __init__(self, inputs: RankInputs) -> None:
        self.inputs, self.spectra, self.shape = inputs, list(inputs.spectra), inputs.shape
        self.multiple_of = inputs.multiple_of
        self.step = f"ranks in multiples of {self.multiple_of}", "lower it with --set ranks.multiple_of=8"

    def _make(self, parameter: float, choice: tuple[str, ...], exact: list[LayerRanks]) -> RankPlan:
        """A plan with its ranks rounded and its compressions counted."""
        rounded = []
        for layer, key, ranks in zip(self.spectra, choice, exact, strict=True):
            qk_columns, vo_columns = layer[key].qk.shape[-1], layer[key].vo.shape[-1]
            multiple = self.multiple_of
            rounded.append(
                [(round_rank(qk, multiple, qk_columns), round_rank(vo, multiple, vo_columns)) for qk, vo in ranks]
            )
        stored, saving = compression(rounded, self.shape), self._saving(choice, rounded)
        planned = compression(exact, self.shape)
        return RankPlan(parameter, choice, exact, rounded, planned, stored, stored if saving is None else saving)

    def _saving(self, choice: tuple[str, ...], rounded: list[LayerRanks]) -> float | None:
        """Share of the cost that is saved, where the cost is not bytes."""
        del choice, rounded
        return None

    def _only(self) -> tuple[tuple[str, ...], list[Spectra]]:
        """The only candidate of each layer."""
        choice = tuple(next(iter(layer)) for layer in self.spectra)
        return choice, [layer[key] for layer, key in zip(self.spectra, choice, strict=True)]
