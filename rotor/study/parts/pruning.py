"""`pruning`: error and seconds by the share of sequences dropped, and by the number of centroids.

Source: ZDC figures 15 and 26.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...recipe import override
from ..context import StudyContext
from ..part import Part, Task
from ..plots import KL_LABEL, double_x, draw_legend, draw_line
from ..store import StudyStore
from ..tables import Table, point_cells
from ..variants import measure_variant, of_two_latents
from .curves import spectra_plot

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CENTROIDS = (64, 256, 1024, 4096)
DROPPED = 0.5
"""Share of the sequences dropped before K-means (ZDC section 5.1)."""


class Pruning(Part):
    name = "pruning"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        plans: dict[str, dict[str, Any]] = {f"share-{share:g}": {"share": share, "kmeans": None} for share in SHARES}
        plans |= {f"kmeans-{k}": {"share": DROPPED, "kmeans": k} for k in CENTROIDS}
        for name in study.plan.focus:
            for label, fields in plans.items():
                key = f"{self.name}/{name}/{label}/p{study.plan.at:.2f}"
                changes = [f"prune.{field}={'null' if v is None else v}" for field, v in fields.items()]
                recipe = override(of_two_latents(study.plan.recipes[name]), changes)
                yield Task(key, partial(measure_variant, study, recipe, {"recipe": name, **fields}), {key: recipe})

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows = []
        for key, record in store.part(self.name).items():
            start = [f"`{record['recipe']}`", f"{record['share']:g}", str(record["kmeans"] or "none")]
            start.append(f"p = {key.rpartition('/p')[2]}")
            if "skipped" in record:
                rows.append([*start, "", "", f"not measured: {record['skipped']}"])
            else:
                rows.append([*start, *point_cells(record), f"{_seconds(record):.2f}"])
        if rows:
            header = ["recipe", "share dropped", "centroids", "compression", "accuracy", "KL", "seconds"]
            yield Table(header, rows, "Pruning and K-means (ZDC figure 26)", "Report split.")

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        found = {key: record for key, record in store.part(self.name).items() if "skipped" not in record}
        if not found:
            return {}
        spectra = {}
        for key, record in found.items():
            recipe, what = key.split("/")[:2]
            label = {"share-0": "all sequences", "share-0.5": "half dropped"}.get(what)
            if label or record["kmeans"]:
                label = label or f"half dropped, {record['kmeans']} centroids"
                spectra[f"{recipe}, {label}"] = record["bases"], recipe
        title = "mean singular values with and without pruning and K-means (ZDC figure 15)"
        return {self.name: partial(_draw, found), **spectra_plot("pruning-spectra", title, store, spectra)}


def _draw(found: dict[str, dict[str, Any]], figure: Any) -> None:
    """KL, and seconds below it, against the share dropped and against the number of centroids."""
    figure.suptitle("pruning and K-means (ZDC figure 26)")
    figure.set_size_inches(11, 8)
    for row, value, label in zip(
        figure.subplots(2, 2), (_kl, _seconds), (KL_LABEL, "seconds to calibrate"), strict=True
    ):
        for axes, by, x in zip(row, ("share", "kmeans"), ("share of the sequences dropped", "centroids"), strict=True):
            for index, recipe in enumerate(dict.fromkeys(record["recipe"] for record in found.values())):
                own = [record for key, record in found.items() if key.startswith(f"{recipe}/{by}-")]
                draw_line(axes, index, [(record[by], value(record)) for record in own], recipe)
            if by == "kmeans" and any(record["kmeans"] for record in found.values()):
                double_x(axes)
            axes.set(xlabel=x, ylabel=label)
            axes.set_ylim(bottom=0)
            draw_legend(axes)


def _kl(record: dict[str, Any]) -> float:
    return float(record["report"]["kl_div"])


def _seconds(record: dict[str, Any]) -> float:
    return float(sum(record["seconds"].values()))
