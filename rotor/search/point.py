"""A measured point: a plan with what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..calibration.allocation.plan import Plan
from ..checkpoint.schemas import CheckpointInfo
from ..errors import UsageError
from .evaluation.accuracy import Fidelity


@dataclass(frozen=True)
class Point(Plan):
    """A plan and its fidelity on each split that it was measured on."""

    search: Fidelity | None = None
    report: Fidelity | None = None

    @classmethod
    def of(cls, plan: Plan) -> Point:
        """A point of a plan that was not measured yet, with shares rounded as files have them."""
        planned = round(plan.planned, 6)
        stored = round(plan.stored, 6)
        return cls(plan.parameter, planned, stored, plan.unrounded, plan.ranks, plan.channels)

    @classmethod
    def of_checkpoint(cls, info: CheckpointInfo, measured: Mapping[str, Fidelity]) -> Point:
        """The plan of a checkpoint by its rotor.json, whose layouts have the channels, with what was measured of it."""
        shares, ranks = info["compression"], info["ranks"]
        unrounded, stored = ([[(qk, v) for qk, v in layer] for layer in ranks[name]] for name in ("exact", "stored"))
        return cls(info["parameter"], shares["planned"], shares["stored"], unrounded, stored, **measured)  # type: ignore[arg-type]

    def fidelity(self, split: str) -> Fidelity:
        """Measurements on a split; raises UsageError if nothing was."""
        measured: Fidelity | None = getattr(self, split)
        if measured is None:
            raise UsageError(
                f"compression {self.stored:.3f}: not measured on the {split} split.", "Export measures it."
            )
        return measured

    def has(self, split: str) -> bool:
        """Tell whether it was measured on a split."""
        return getattr(self, split) is not None

    def with_fidelity(self, split: str, measured: Fidelity) -> Point:
        """The same plan, with what was measured on one more split."""
        return replace(self, **{split: measured})  # type: ignore[arg-type]
