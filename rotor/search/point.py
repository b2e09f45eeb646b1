"""A measured point: a rank plan with what was measured of it, and how both stand in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from ..allocation import RankPlan
from ..errors import UsageError
from ..evaluation.fidelity import Fidelity
from ..format.layout import LayerRanks
from ..format.schemas import CompressionInfo, PointRanks
from ..typed import Reader


class _PointInfo(TypedDict):
    parameter: float
    compression: CompressionInfo
    choice: list[str]
    ranks: PointRanks


class PointInfo(_PointInfo, total=False):
    """A Point in a JSON file; a split that was not measured is absent."""

    search: dict[str, Any]
    report: dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A plan and its fidelity on each split that it was measured on.

    parameter: what the rank method's knob was. planned, stored: share of the KV cache removed by exact, stored ranks.
    choice: key of the candidate of each layer. exact, ranks: of each layer's groups, as given by the method and stored.
    """

    parameter: float
    planned: float
    stored: float
    choice: tuple[str, ...]
    exact: list[LayerRanks]
    ranks: list[LayerRanks]
    search: Fidelity | None = None
    report: Fidelity | None = None

    @classmethod
    def of(cls, plan: RankPlan) -> Point:
        """A plan of which nothing is measured yet."""
        return cls(plan.parameter, round(plan.planned, 6), round(plan.stored, 6), plan.choice, plan.exact, plan.rounded)

    @property
    def key(self) -> str:
        """Equal for points whose stored tensors are equal, whatever method or objective led to them."""
        return plan_key(self.choice, self.ranks)

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
        return replace(self, search=found) if split == "search" else replace(self, report=found)

    @property
    def compression_json(self) -> dict[str, float]:
        return {"planned": self.planned, "stored": self.stored}

    @property
    def ranks_json(self) -> dict[str, Any]:
        return {"exact": as_lists(self.exact), "stored": as_lists(self.ranks)}

    def to_json(self) -> dict[str, Any]:
        """What from_json reads."""
        data: dict[str, Any] = {
            "parameter": self.parameter,
            "compression": self.compression_json,
            "choice": list(self.choice),
            "ranks": self.ranks_json,
        }
        return data | {split: self.fidelity(split).to_json() for split in ("search", "report") if self.has(split)}

    @classmethod
    def from_json(cls, data: Any, name: str, reader: Reader) -> Point:
        """Raises the reader's error, with the field's name, if it is not what to_json gives."""
        found: Any = reader.read(PointInfo, data, name)
        splits = {
            split: Fidelity.from_json(found[split], f"{name}.{split}", reader)
            for split in ("search", "report")
            if split in found
        }
        exact, stored = (
            [[(qk, v) for qk, v in layer] for layer in found["ranks"][kind]] for kind in ("exact", "stored")
        )
        compression = found["compression"]
        return cls(
            found["parameter"],
            compression["planned"],
            compression["stored"],
            tuple(found["choice"]),
            exact,
            stored,
            **splits,
        )


def plan_key(choice: Sequence[str], ranks: list[LayerRanks]) -> str:
    """See Point.key."""
    return json.dumps([list(choice), ranks], separators=(",", ":"))


def as_lists(ranks: list[LayerRanks]) -> list[list[list[int]]]:
    """Ranks as JSON has them."""
    return [[list(pair) for pair in layer] for layer in ranks]
