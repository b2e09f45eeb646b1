"""`pruning`: error, seconds and spectra by the share of sequences dropped and by the number of K-means centroids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..bases import SIDE_LABELS, mean_spectra
from ..context import StudyContext
from ..part import Part, Task
from ..plots import KL_LABEL, draw_legend, draw_line
from ..store import StudyStore
from ..tables import Table, point_cells
from ..variants import compared_by_tokens, measure_variant, of_two_latents

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CENTROIDS = (64, 256, 1024, 4096)
"""After half of the sequences is dropped (ZDC section 5.1)."""


class Pruning(Part):
    name = "pruning"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        plans: dict[str, tuple[float, int | None]] = {f"share-{share:g}": (share, None) for share in SHARES}
        plans |= {f"kmeans-{count}": (0.5, count) for count in CENTROIDS}
        for name, recipe in compared_by_tokens(study, self.name).items():
            for label, (share, kmeans) in plans.items():
                key = f"{self.name}/{name}/{label}/p{study.plan.at:.2f}"
                prune = replace(recipe.prune, share=share, kmeans=kmeans)
                variant = replace(of_two_latents(recipe), prune=prune)
                facts = {"recipe": name, "share": share, "kmeans": kmeans}
                yield Task(key, partial(measure_variant, study, variant, facts, mean_spectra), {key: variant})

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows = []
        for key, found in store.part(self.name).items():
            start = [f"`{found['recipe']}`", f"{found['share']:g}", str(found["kmeans"] or "none")]
            start.append(f"p = {key.rpartition('/p')[2]}")
            if "skipped" in found:
                rows.append([*start, "", "", f"not measured: {found['skipped']}"])
            else:
                rows.append([*start, *point_cells(found), f"{sum(found['seconds'].values()):.2f}"])
        if rows:
            header = ["recipe", "share dropped", "centroids", "compression", "accuracy", "KL", "seconds"]
            yield Table(header, rows, "Pruning and K-means (ZDC figure 26)", "Report split.")

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        found = [record for record in store.part(self.name).values() if "skipped" not in record]
        return {"pruning": partial(_draw, found), "pruning-spectra": partial(_draw_spectra, found)} if found else {}


def _draw(records: list[dict[str, Any]], figure: Any) -> None:
    figure.suptitle("pruning and K-means: KL, and seconds to calibrate (ZDC figure 26)")
    titles = {"share": "share of the sequences dropped", "kmeans": "centroids, after half is dropped"}
    for line, (by, title) in zip(figure.subplots(2, 2, sharex="col").T, titles.items(), strict=True):
        for index, recipe in enumerate(dict.fromkeys(record["recipe"] for record in records)):
            own = [r for r in records if r["recipe"] == recipe and (r["kmeans"] is None) == (by == "share")]
            draw_line(line[0], index, [(r[by], r["report"]["kl_div"]) for r in own], recipe)
            draw_line(line[1], index, [(r[by], sum(r["seconds"].values())) for r in own], recipe)
        line[1].set_xlabel(title)
    for axes, label in zip(figure.axes[::2], (KL_LABEL, "seconds"), strict=True):
        axes.set_ylabel(label)
    draw_legend(figure.axes[0])


def _draw_spectra(records: list[dict[str, Any]], figure: Any) -> None:
    figure.suptitle("mean singular values with and without pruning and K-means (ZDC figure 15)")
    shown = [record for record in records if record["kmeans"] or record["share"] in (0, 0.5)]
    for axes, (side, label) in zip(figure.subplots(1, 2), SIDE_LABELS.items(), strict=True):
        for index, found in enumerate(shown):
            name = f"{found['recipe']}, {found['share']:g} dropped, centroids: {found['kmeans'] or 'none'}"
            draw_line(axes, index, list(enumerate(found["bases"][side], 1)), name, marker="")
        axes.set(title=label, xlabel="channel", yscale="log")
    draw_legend(figure.axes[0])
