"""Rank plans, and the ordered paths of them that every rank method gives."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ...checkpoint.layout import AttentionShape, LayerRanks, compression
from ...checkpoint.schemas import PlanRanks
from ..codes.layer import GroupChannels, channels_bytes

SideSensitivity = list[tuple[int, float]]
"""(rank, loss per unit of dropped energy when all groups of the layer have that rank), by rising rank; the loss is KL
in nats per token. Empty where no rank drops any energy."""

Sensitivity = tuple[SideSensitivity, SideSensitivity]
"""Of qk and of vo of a layer."""

SLACK = 1e-9
"""Slack in comparing compressions, so that rounding errors do not decide."""


@dataclass(frozen=True)
class Spectra:
    """Singular values of a layer, each [num_groups, columns], descending."""

    qk: Tensor
    vo: Tensor


@dataclass(frozen=True)
class Plan:
    """The ranks of every layer's groups, from the method that chooses them to the checkpoint that stores them.

    parameter: what the method's knob was (the removal rate, a price, a share).
    planned, stored: share of the KV cache removed by the exact and by the stored ranks.
    exact, ranks: of each layer's groups, as the method gives them and as they are stored.
    channels: where they are codes, those of each layer's groups; ranks then count those of any width.
    """

    parameter: float
    planned: float
    stored: float
    exact: list[LayerRanks]
    ranks: list[LayerRanks]
    channels: list[GroupChannels] | None = None

    @property
    def key(self) -> str:
        """Equal for plans whose stored tensors are equal, whatever method led to them."""
        return json.dumps(self.ranks if self.channels is None else self.channels_json, separators=(",", ":"))

    def row_bytes(self, element_bytes: int) -> list[int]:
        """Bytes of a token in each layer, in a model whose dtype takes element_bytes."""
        if self.channels is not None:
            return [channels_bytes([layer]) for layer in self.channels]
        return [element_bytes * sum(qk + v for qk, v in layer) for layer in self.ranks]

    @property
    def channels_json(self) -> list[list[list[dict[str, int]]]]:
        """Channels by bits, of each layer and group, of keys and of values or of both together; nothing for ranks."""
        layers = self.channels or []
        return [[[side.to_dict() for side in pair if side] for pair in layer] for layer in layers]

    @property
    def ranks_json(self) -> PlanRanks:
        """The ranks as rotor.json has them."""
        exact, stored = ([[list(pair) for pair in layer] for layer in ranks] for ranks in (self.exact, self.ranks))
        content: PlanRanks = {"exact": exact, "stored": stored}
        if self.channels is not None:
            content["channels"] = self.channels_json
        return content


@dataclass(frozen=True)
class RankInputs:
    """Inputs of a method: spectra and sizes of all layers, and what else is measured, where it is asked for.

    multiple_of: stored ranks are multiples of this (or all columns).
    gradients: per layer the summed squared gradients of W_k and W_v of each group, each [num_groups].
    sensitivities: per layer. context_tokens: of the sequence whose bytes are counted; None counts all layers alike.
    """

    spectra: Sequence[Spectra]
    shape: AttentionShape
    multiple_of: int
    gradients: Callable[[], Sequence[tuple[Tensor, Tensor]]] = tuple
    sensitivities: Sequence[Sensitivity] = ()
    context_tokens: int | None = None


def round_rank(rank: int, multiple_of: int, columns: int) -> int:
    """Round up to what the kernels' tiles need, but never beyond the columns that there are."""
    return min(-(-rank // multiple_of) * multiple_of, columns)


class RankPath(ABC):
    """Path of all plans that a method can give for a model, ordered by stored compression."""

    step: tuple[str, str]
    """What plans are made of, and what makes that finer: for a message."""

    @abstractmethod
    def _plans(self) -> list[Plan]:
        """List every plan of the method, mildest first; duplicates allowed."""

    @cached_property
    def _steps(self) -> list[Plan]:
        distinct: dict[float, Plan] = {}
        for plan in self._plans():
            distinct.setdefault(round(plan.stored, 9), plan)
        return [distinct[key] for key in sorted(distinct)]

    def steps(self) -> list[Plan]:
        """List one plan for each distinct compression, rising; the mildest parameter of each."""
        return self._steps

    def at_compression(self, target: float) -> Plan | None:
        """The mildest step that removes at least `target` of the cache, or None if none does."""
        return next((plan for plan in self.steps() if plan.stored >= target - SLACK), None)

    def lighter(self, plan: Plan) -> list[Plan]:
        """Plans beside the path that store one unit less than `plan`, the most promising first; none by default."""
        del plan
        return []


class SpectraPath(RankPath):
    """Path of plans of ranks, from singular values."""

    def __init__(self, inputs: RankInputs) -> None:
        self.inputs, self.spectra, self.shape = inputs, list(inputs.spectra), inputs.shape
        self.multiple_of, self.columns = inputs.multiple_of, inputs.spectra[0].qk.shape[-1]
        self.step = f"ranks in multiples of {self.multiple_of}", "lower it with --set ranks.multiple_of=8"

    def _make(self, parameter: float, exact: list[LayerRanks]) -> Plan:
        """A plan with its ranks rounded and its compressions counted."""
        stored_ranks = [
            [
                (round_rank(qk, self.multiple_of, self.columns), round_rank(v, self.multiple_of, self.columns))
                for qk, v in ranks
            ]
            for ranks in exact
        ]
        tokens = self.inputs.context_tokens
        planned = compression(exact, self.shape, tokens)
        stored = compression(stored_ranks, self.shape, tokens)
        return Plan(parameter, planned, stored, exact, stored_ranks)
