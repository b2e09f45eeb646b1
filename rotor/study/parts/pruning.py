"""`pruning`: error and seconds by the share of sequences dropped and by the number of K-means centroids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from ..context import StudyContext
from ..part import Task
from ..variants import VariantPart, compared_by_tokens, measure_variant, of_two_latents

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CENTROIDS = (64, 256, 1024, 4096)
"""After half of the sequences is dropped (ZDC section 5.1)."""


class Pruning(VariantPart):
    name = "pruning"
    title = "Pruning and K-means (ZDC figure 26)"
    facts: ClassVar = {"share": "share dropped", "kmeans": "centroids"}
    more = ("seconds",)
    x = ("share", "share of the sequences dropped")
    second = "seconds to calibrate"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        plans: dict[str, tuple[float, int | None]] = {f"share-{share:g}": (share, None) for share in SHARES}
        plans |= {f"kmeans-{count}": (0.5, count) for count in CENTROIDS}
        for name, recipe in compared_by_tokens(study, self.name).items():
            for label, (share, kmeans) in plans.items():
                key = f"{self.name}/{name}/{label}/p{study.plan.at:.2f}"
                prune = replace(recipe.prune, share=share, kmeans=kmeans)
                variant = replace(of_two_latents(recipe), prune=prune)
                facts = {"recipe": name, "share": share, "kmeans": kmeans}
                yield Task(key, partial(measure_variant, study, variant, facts, lambda bases: None), {key: variant})

    def cells(self, record: dict[str, Any]) -> list[str]:
        return [f"{sum(record['seconds'].values()):.2f}"]

    def line(self, record: dict[str, Any]) -> tuple[str, float]:
        name = record["recipe"] + (f", {record['kmeans']} centroids" if record["kmeans"] else "")
        return name, sum(record["seconds"].values())
