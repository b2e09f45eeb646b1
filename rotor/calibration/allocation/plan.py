"""Rank plans, and the ordered path of plans that every method gives."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import Field
from torch import Tensor

from ...checkpoint.layout import AttentionShape, LayerRanks
from ...checkpoint.schemas import PlanRanks
from ...checkpoint.sizes import compression
from ..codes.layer import GroupChannels, channels_bytes

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
class Plan:
    """The ranks of every layer's groups, from the method that chooses them to the checkpoint that stores them.

    parameter: value of the method's parameter (the removal rate, a price, a share).
    planned, stored: compression (share of the KV cache removed) with the unrounded and the stored ranks.
    unrounded, ranks: ranks from the method, and ranks as stored. In files the former are `exact`.
    channels: coded channels of each layer's groups, None for a plan of ranks; with codes a rank counts the channels of
        any width.
    loss: what the path predicts that the plan costs, in nats per token; None where it predicts nothing.
    """

    parameter: float
    planned: float
    stored: float
    unrounded: Annotated[list[LayerRanks], Field(alias="exact")]
    ranks: list[LayerRanks]
    channels: list[GroupChannels] | None = None
    loss: float | None = None

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
        return [[[row.to_dict() for row in rows] for rows in layer] for layer in self.channels or []]

    @property
    def ranks_json(self) -> PlanRanks:
        """The ranks as rotor.json has them."""
        sides = (self.unrounded, self.ranks)
        unrounded, stored = ([[list(pair) for pair in layer] for layer in ranks] for ranks in sides)
        content: PlanRanks = {"exact": unrounded, "stored": stored}
        if self.channels is not None:
            content["channels"] = self.channels_json
        return content


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
    def _plans(self) -> list[Plan]:
        """List every plan of the method, mildest first; duplicates allowed."""

    @cached_property
    def _distinct_plans(self) -> list[Plan]:
        distinct: dict[float, Plan] = {}
        for plan in self._plans():
            distinct.setdefault(round(plan.stored, 9), plan)
        return [distinct[key] for key in sorted(distinct)]

    def plans(self) -> list[Plan]:
        """List one plan for each distinct compression, rising; the mildest parameter of each."""
        return self._distinct_plans

    def at_compression(self, target: float) -> Plan | None:
        """The mildest plan that removes at least `target` of the cache, or None."""
        return next((plan for plan in self.plans() if plan.stored >= target - COMPRESSION_SLACK), None)

    def lighter(self, plan: Plan) -> list[Plan]:
        """Plans off the path that store one unit less than `plan`, the most promising first; none by default."""
        del plan
        return []


class SpectraPath(RankPath):
    """Path of rank plans from singular values.

    columns: of each layer.
    """

    def __init__(self, inputs: RankInputs) -> None:
        self.inputs = inputs
        self.spectra = list(inputs.spectra)
        self.shape = inputs.shape
        self.multiple_of = inputs.multiple_of
        self.columns = [spectra.qk.shape[-1] for spectra in inputs.spectra]
        self.granularity = (
            f"ranks in multiples of {self.multiple_of}",
            f"lower it with --set ranks.multiple_of={max(1, self.multiple_of // 2)}",
        )

    def _make(self, parameter: float, unrounded: list[LayerRanks]) -> Plan:
        """Make a plan: round its ranks and count its compression."""
        stored_ranks = [
            [(round_rank(qk, self.multiple_of, columns), round_rank(v, self.multiple_of, columns)) for qk, v in ranks]
            for ranks, columns in zip(unrounded, self.columns, strict=True)
        ]
        tokens = self.inputs.context_tokens
        planned = compression(unrounded, self.shape, tokens)
        stored = compression(stored_ranks, self.shape, tokens)
        return Plan(parameter, planned, stored, unrounded, stored_ranks)
