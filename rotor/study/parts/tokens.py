"""`tokens`: error at one compression, and distance of the bases to those from other text, by number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ...recipe import Recipe
from ..bases import SIDE_LABELS, compare_bases
from ..context import StudyContext
from ..part import Part, Task
from ..plots import KL_LABEL, LEAST_KL, double_x, draw_legend, draw_line
from ..records import first_candidates
from ..store import StudyStore
from ..tables import Table, point_cells
from ..variants import (
    compared_by_tokens,
    from_source,
    measure_variant,
    variant_folder,
    variant_run,
    write_text,
)

COUNTED = ("random", "text", "synthetic")
REFERENCE = "other-text"


class Tokens(Part):
    name = "tokens"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in compared_by_tokens(study, self.name).items():
            kept = {variant_folder(name, REFERENCE): from_source(study, recipe, REFERENCE)}
            for source in COUNTED:
                for count in study.plan.counts:
                    key = f"{self.name}/{name}/{source}/{count}/p{study.plan.at:.2f}"
                    variant = from_source(study, recipe, source)
                    variant = replace(variant, tokens=replace(variant.tokens, count=count))
                    yield Task(key, partial(_measure, study, name, source, variant), {**kept, key: variant})

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows, records = [], store.part(self.name)
        for key, record in sorted(records.items(), key=lambda i: (i[1]["recipe"], i[1]["source"], i[1]["count"])):
            start = [f"`{record['recipe']}`", record["source"], str(record["count"]), f"p = {key.rpartition('/p')[2]}"]
            if "skipped" in record:
                rows.append([*start, "", "", "", "", f"not measured: {record['skipped']}"])
                continue
            ratios = [f"{100 * record['bases'][side]['ratio']:.2f} %" for side in SIDE_LABELS]
            rows.append([*start, *point_cells(record), *ratios, ""])
        if rows:
            header = ["recipe", "source", "tokens", "compression", "accuracy", "KL"]
            header += [*(f"delta/epsilon {label}" for label in SIDE_LABELS.values()), ""]
            text = (
                "Report split. Delta over epsilon is against the bases from other text (FDC figure 14, ZACK figure 18)."
            )
            yield Table(header, rows, "Error by number of calibration tokens", text)

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        found = {key: record for key, record in store.part(self.name).items() if "skipped" not in record}
        return {self.name: partial(_draw, found)} if found else {}


def _draw(records: dict[str, dict[str, Any]], figure: Any) -> None:
    figure.suptitle("error against the number of calibration tokens")
    series: dict[str, list[tuple[int, float, float]]] = {}
    for key, record in sorted(records.items(), key=lambda item: item[1]["count"]):
        name = f"{record['recipe']}, {record['source']}, p = {float(key.rpartition('/p')[2]):g}"
        kl, ratio = max(record["report"]["kl_div"], LEAST_KL), 100 * record["bases"]["qk"]["ratio"]
        series.setdefault(name, []).append((record["count"], kl, ratio))
    divergence, distance = figure.subplots(1, 2)
    for index, (name, places) in enumerate(series.items()):
        draw_line(divergence, index, [(count, kl) for count, kl, _ in places], name)
        draw_line(distance, index, [(count, ratio) for count, _, ratio in places], name)
    for axes in (divergence, distance):
        double_x(axes)
        axes.set_xlabel("calibration tokens")
    divergence.set(ylabel=KL_LABEL, yscale="log")
    distance.set_ylabel("delta / epsilon of QK against other text (%)")
    distance.set_ylim(bottom=0)
    draw_legend(divergence)


def _measure(study: StudyContext, name: str, source: str, variant: Recipe) -> dict[str, Any]:
    recipe = study.plan.recipes[name]
    reference = first_candidates(variant_run(study, name, recipe, REFERENCE))
    write_text(study, recipe, source)
    facts = {"recipe": name, "source": source, "count": variant.tokens.count}
    return measure_variant(study, variant, facts, partial(compare_bases, reference))
