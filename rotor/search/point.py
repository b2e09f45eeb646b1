"""A measured point: a rank plan with what was measured of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ..calibration.allocation.plan import RankPlan
from ..calibration.codes.layer import GroupChannels, channels_bytes
from ..checkpoint.layout import LayerRanks
from ..errors import UsageError
from .evaluation.fidelity import Fidelity


@dataclass(frozen=True)
class Point:
    """A plan and its fidelity on each split that it was measured on, and on the report split's long rows.

    parameter: the rank method's own (a removal rate, a price). planned, stored: share of the KV cache removed by exact
    and by stored ranks. exact, ranks: of each layer's groups, as given by
    the method and as stored. channels: of each layer's groups, where they are codes.
    """

    parameter: float
    planned: float
    stored: float
    exact: list[LayerRanks]
    ranks: list[LayerRanks]
    search: Fidelity | None = None
    report: Fidelity | None = None
    long: Fidelity | None = None
    channels: list[GroupChannels] | None = None

    @classmethod
    def of(cls, plan: RankPlan) -> Point:
        """A plan of which nothing is measured yet."""
        planned, stored = round(plan.planned, 6), round(plan.stored, 6)
        return cls(plan.parameter, planned, stored, plan.exact, plan.rounded, channels=plan.channels)

    @property
    def key(self) -> str:
        """Equal for points whose stored tensors are equal, whatever method led to them."""
        return plan_key(self.ranks, self.channels)

    def fidelity(self, split: str) -> Fidelity:
        """On a split that was measured; raises UsageError if it was not."""
        found: Fidelity | None = getattr(self, split)
        if found is None:
            raise UsageError(
                f"compression {self.stored:.3f}: not measured on the {split} split.", "Export measures it."
            )
        return found

    def has(self, split: str) -> bool:
        """Whether it was measured on a split."""
        return getattr(self, split) is not None

    def with_fidelity(self, split: str, found: Fidelity) -> Point:
        """Itself, with what was measured on a split."""
        return replace(self, **{split: found})  # type: ignore[arg-type]

    def row_bytes(self, element_bytes: int) -> list[int]:
        """Bytes of a token in each layer, in a model whose dtype takes element_bytes."""
        if self.channels is not None:
            return [channels_bytes([layer]) for layer in self.channels]
        return [element_bytes * sum(qk + v for qk, v in layer) for layer in self.ranks]

    @property
    def compression_json(self) -> dict[str, float]:
        return {"planned": self.planned, "stored": self.stored}

    @property
    def ranks_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"exact": as_lists(self.exact), "stored": as_lists(self.ranks)}
        return found if self.channels is None else found | {"channels": channels_json(self.channels)}


def plan_key(ranks: list[LayerRanks], channels: list[GroupChannels] | None = None) -> str:
    """See Point.key."""
    return json.dumps(ranks if channels is None else channels_json(channels), separators=(",", ":"))


def channels_json(channels: list[GroupChannels]) -> list[list[list[dict[str, int]]]]:
    """Channels by bits as JSON has them: of each layer and group, those of keys and of values, or of both together."""
    return [[[side.to_dict() for side in pair if side] for pair in layer] for layer in channels]


def as_lists(ranks: list[LayerRanks]) -> list[list[list[int]]]:
    """Ranks as JSON has them."""
    return [[list(pair) for pair in layer] for layer in ranks]
