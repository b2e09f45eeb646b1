"""Recipes by their calibration tokens, and parts that calibrate many variants of one."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..bases.layer import LayerBases
from ..bases.registry import sides_that_read_tokens
from ..data.splits import held_out_documents
from ..errors import DataError
from ..format.places import remove
from ..recipe import Evaluation, Recipe
from .context import StudyContext
from .part import Part
from .plots import KL_LABEL, LEAST_KL, draw_legend, draw_line
from .records import bases_of, point_record, stage_seconds
from .store import StudyStore
from .tables import Table, point_cells

SOURCES: dict[str, dict[str, Any]] = {
    "random": {"source": "random", "seed": 0},
    "random-1": {"source": "random", "seed": 1},
    "text": {"source": "text"},
    "other-text": {"source": "text"},
    "synthetic": {"source": "synthetic"},
}
"""Random tokens of two seeds, text of the third of the documents that is kept for it, and text that the model writes;
`other-text` is of the report third, so that its bases are only compared with and never measured."""

SPLIT = {"text": "calibration", "other-text": "report"}


def of_two_latents(recipe: Recipe) -> Recipe:
    """The recipe with a latent for keys and one for values: what looks at one side alone needs a basis of that side."""
    return replace(recipe, groups=replace(recipe.groups, joint=False))


def from_source(study: StudyContext, recipe: Recipe, source: str) -> Recipe:
    """The recipe with calibration tokens of one of SOURCES."""
    path = str(_text_folder(study, source)) if source in SPLIT else None
    tokens = replace(recipe.tokens, path=path, **SOURCES[source])
    # The folders hold one split each: with other held-out text, nothing is left out of them.
    return replace(of_two_latents(recipe), tokens=tokens, evaluation=Evaluation())


def write_text(study: StudyContext, recipe: Recipe, source: str) -> None:
    """The documents of a source's third of the held-out text, one file each, unless they are there."""
    folder = _text_folder(study, source) if source in SPLIT else None
    if folder is not None and not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        for index, document in enumerate(getattr(held_out_documents(recipe.evaluation), SPLIT[source])):
            (staging / f"{index:05d}.txt").write_text(document, "utf-8")
        staging.rename(folder)


def measure_variant(
    study: StudyContext, recipe: Recipe, facts: dict[str, Any], describe: Callable[[list[LayerBases]], Any]
) -> dict[str, Any]:
    """A point at the study's fixed compression, of a calibration that is removed again.

    Args:
        facts: that the record begins with. describe: gives its `bases`.
    """
    folder, at, record = study.folder("variant"), study.plan.at, facts
    try:
        run = study.calibrate(folder, recipe, overwrite=True)
        record = {**facts, "seconds": stage_seconds(run)}
        measurer = study.measurer(run, recipe)
        plan = measurer.path_of(recipe).at_compression(at)
        if plan is None:
            return {**record, "skipped": f"compression {at:g} is out of reach"}
        return {**record, **point_record(measurer.measure(plan)), "bases": describe(bases_of(run))}
    except DataError as error:  # fewer tokens than dimensions, or than the text has, or than centroids
        return {**record, "skipped": error.message}
    finally:
        if folder.is_dir():
            remove(folder, "run")


def reads_tokens(recipe: Recipe) -> bool:
    """Whether calibration tokens decide anything of a recipe: of its bases, bits or ranks."""
    sides = sides_that_read_tokens(recipe.bases.qk, recipe.bases.vo)
    return bool(sides) or recipe.coded or recipe.bases.refit or "gradients" in recipe.rank_needs


def compared_by_tokens(study: StudyContext, part: str) -> dict[str, Recipe]:
    """The recipes in focus of which tokens decide anything; the log names the others."""
    found = {}
    for name in study.plan.focus:
        if reads_tokens(study.plan.recipes[name]):
            found[name] = study.plan.recipes[name]
        else:
            study.progress.message(f"{part}: {name} takes bases and ranks from the weights alone; no tokens change it")
    return found


class VariantPart(Part):
    """A part that calibrates variants of the recipes in focus and measures each at the study's fixed compression.

    facts: of its records, what tells variants apart, with the heads of their columns. more: the heads of what `cells`
    gives. x: the fact that its plot goes by, with the axis' label; second: the label of the plot beside that of KL.
    """

    title: ClassVar[str]
    text: ClassVar[str] = "Report split."
    facts: ClassVar[dict[str, str]]
    more: ClassVar[tuple[str, ...]]
    x: ClassVar[tuple[str, str]]
    second: ClassVar[str]

    @abstractmethod
    def cells(self, record: dict[str, Any]) -> list[str]:
        """What a record has beside accuracy and KL."""

    @abstractmethod
    def line(self, record: dict[str, Any]) -> tuple[str, float]:
        """The line of the plot that a record belongs to, and its value in the second plot."""

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows = []
        for key, record in store.part(self.name).items():
            start = [
                f"`{record['recipe']}`",
                *(f"{record[fact]}" for fact in self.facts),
                f"p = {key.rpartition('/p')[2]}",
            ]
            if "skipped" in record:
                rows.append([*start, f"not measured: {record['skipped']}", "", *("" for _ in self.more)])
            else:
                rows.append([*start, *point_cells(record), *self.cells(record)])
        if rows:
            header = ["recipe", *self.facts.values(), "compression", "accuracy", "KL", *self.more]
            yield Table(header, rows, self.title, self.text)

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        found = [record for record in store.part(self.name).values() if "skipped" not in record]
        return {self.name: partial(self.draw, found)} if found else {}

    def draw(self, records: Iterable[dict[str, Any]], figure: Any) -> None:
        """KL and the second value, by x."""
        figure.suptitle(self.title)
        fact, label = self.x
        series: dict[str, list[tuple[float, float, float]]] = {}
        for record in sorted(records, key=lambda record: record[fact]):
            name, value = self.line(record)
            series.setdefault(name, []).append((record[fact], max(record["report"]["kl_div"], LEAST_KL), value))
        divergence, second = figure.subplots(1, 2)
        for index, (name, points) in enumerate(series.items()):
            draw_line(divergence, index, [(x, kl) for x, kl, _ in points], name)
            draw_line(second, index, [(x, value) for x, _, value in points], name)
        divergence.set(xlabel=label, ylabel=KL_LABEL, yscale="log")
        second.set(xlabel=label, ylabel=self.second)
        draw_legend(divergence)


def _text_folder(study: StudyContext, source: str) -> Path:
    return study.store.folder / "text" / SPLIT[source]
