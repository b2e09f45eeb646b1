"""`ablation`: as `curves`, of changes to one recipe, beside that recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ..context import StudyContext
from ..part import Task
from ..store import StudyStore
from .curves import Curves, Records, curve_tasks, curves


class Ablation(Curves):
    name = plot = "ablation"
    title = "Ablation"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        base = study.plan.first
        yield from curve_tasks(study, Curves.name, base.name, base, base.name)
        for name, recipe in study.plan.variants.items():
            yield from curve_tasks(study, self.name, name, recipe, f"ablations/{name}")

    def shown(self, store: StudyStore) -> dict[str, Records]:
        """The ablations, each recipe that they start from before them."""
        found = curves(store, self.name)
        bases = curves(store, Curves.name).items()
        return {**{name: r for name, r in bases if any(own.startswith(f"{name}-") for own in found)}, **found}
