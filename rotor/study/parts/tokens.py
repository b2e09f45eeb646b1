"""`tokens`: error at one compression, and how far bases are from those of other text, by source and number of tokens.

Source: FDC section 3.2 (tables 2 to 4, figure 14), ZACK section 4.3 (tables 4 to 7, figure 18).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from ...bases.layer import LayerBases
from ...recipe import Recipe
from ..bases import SIDE_LABELS, compare_bases, first_value_variation
from ..context import StudyContext
from ..part import Task
from ..records import bases_of
from ..variants import VariantPart, compared_by_tokens, from_source, measure_variant, write_text

COUNTED = ("random", "random-1", "text", "synthetic")
REFERENCES = ("other-text", "random")
"""Calibrations that are kept, with whose bases all are compared."""


class Tokens(VariantPart):
    name = "tokens"
    title = "Error and bases by source and number of calibration tokens"
    text = (
        "Report split. Distances are to the bases from other text, and from random tokens of the first seed: the mean "
        "absolute difference of entries over their mean size (signs aligned, vectors of norm 1), and the mean "
        "principal angle in degrees between the subspaces of half of the channels. CV: coefficient of variation of the "
        "largest singular value over all groups."
    )
    facts: ClassVar = {"source": "source", "count": "tokens"}
    more = tuple(
        f"{label}: {what}"
        for label in SIDE_LABELS.values()
        for what in ("to other text", "angle", "to random tokens", "angle", "CV")
    )
    x = ("count", "calibration tokens")
    second = "delta / epsilon of QK against other text (%)"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in compared_by_tokens(study, self.name).items():
            kept = {_folder(name, source): from_source(study, recipe, source) for source in REFERENCES}
            for source in COUNTED:
                for count in study.plan.counts:
                    key = f"{self.name}/{name}/{source}/{count}/p{study.plan.at:.2f}"
                    variant = from_source(study, recipe, source)
                    variant = replace(variant, tokens=replace(variant.tokens, count=count))
                    yield Task(key, partial(_measure, study, name, source, variant), {**kept, key: variant})

    def cells(self, record: dict[str, Any]) -> list[str]:
        cells = []
        for side in SIDE_LABELS:
            for found in (record["bases"][source][side] for source in REFERENCES):
                cells += [f"{100 * found['ratio']:.2f} %", f"{found['angles_degrees']['0.5']['mean']:.2f}"]
            cells.append(f"{100 * record['bases']['cv'][side]:.2f} %")
        return cells

    def line(self, record: dict[str, Any]) -> tuple[str, float]:
        return f"{record['recipe']}, {record['source']}", 100 * record["bases"][REFERENCES[0]]["qk"]["ratio"]


def _folder(name: str, source: str) -> str:
    return f"sources/{name}/{source}"


def _measure(study: StudyContext, name: str, source: str, variant: Recipe) -> dict[str, Any]:
    recipe, references = study.plan.recipes[name], {}
    for reference in REFERENCES:
        write_text(study, recipe, reference)
        run = study.run(_folder(name, reference), from_source(study, recipe, reference))
        references[reference] = bases_of(run)
    write_text(study, recipe, source)

    def describe(bases: Sequence[LayerBases]) -> dict[str, Any]:
        compared = {reference: compare_bases(other, bases) for reference, other in references.items()}
        return {**compared, "cv": {side: first_value_variation(bases, side) for side in SIDE_LABELS}}

    facts = {"recipe": name, "source": source, "count": variant.tokens.count}
    return measure_variant(study, variant, facts, describe)
