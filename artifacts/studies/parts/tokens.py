"""Parts of a study that calibrate variants of the first recipe, each measured at the compression AT.

`Tokens`: error, and how far bases are from those of other text, by source and number of calibration tokens (FDC
section 3.2, tables 2 to 4, figure 14; ZACK section 4.3, tables 4 to 7, figure 18). `Pruning`: error and seconds by the
share of sequences dropped and by the number of K-means centroids (ZDC figure 26).

    rotor study MODEL --recipes fdc --parts artifacts/studies/parts/tokens.py:Tokens -o STUDY
    rotor study MODEL --recipes zdc --parts artifacts/studies/parts/tokens.py:Pruning -o STUDY
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.linalg import subspace_angles
from scipy.stats import variation
from torch import Tensor
from torch.nn import functional

from rotor import Run
from rotor.checkpoint.bases import LayerBases
from rotor.checkpoint.output_folder import remove
from rotor.errors import DataError
from rotor.models.splits import held_out_documents
from rotor.recipe.recipe import Recipe
from rotor.recipe.sections import Evaluation
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, Table, Task, number
from rotor.tools.study.parts.curves import point_record
from rotor.tools.study.plots import KL_LABEL, LEAST_KL, draw_legend, draw_line
from rotor.tools.study.store import StudyStore

AT = 0.5
COUNTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Numbers of calibration tokens."""

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
COUNTED = ("random", "random-1", "text", "synthetic")
REFERENCES = ("other-text", "random")
"""Calibrations that are kept, with whose bases all are compared."""

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CENTROIDS = (64, 256, 1024, 4096)
"""After half of the sequences is dropped (ZDC section 5.1)."""

SIDE_LABELS = {"qk": "QK", "vo": "V"}
"""Attributes of LayerBases: the query/key basis and the value/output basis."""


class VariantPart(Part):
    """facts: of its records, what tells variants apart, with the heads of their columns. more: the heads of what
    `cells` gives. x: the fact that its plot goes by, with the axis' label; second: the label of the plot beside KL's.
    """

    title: ClassVar[str]
    text: ClassVar[str] = "Report split."
    facts: ClassVar[dict[str, str]]
    more: ClassVar[tuple[str, ...]]
    x: ClassVar[tuple[str, str]]
    second: ClassVar[str]

    @abstractmethod
    def cells(self, record: dict[str, Any]) -> list[str]:
        """Cells of a record beside accuracy and KL."""

    @abstractmethod
    def line(self, record: dict[str, Any]) -> tuple[str, float]:
        """The line of the plot that a record belongs to, and its value in the second plot."""

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows = []
        for record in store.part(self.name).values():
            start = [f"`{record['recipe']}`", *(f"{record[fact]}" for fact in self.facts)]
            if "skipped" in record:
                rows.append([*start, f"not measured: {record['skipped']}", "", *("" for _ in self.more)])
            else:
                report = record["report"]
                rows.append([*start, number(report["accuracy"]), number(report["kl_div"], 5), *self.cells(record)])
        if rows:
            yield Table(["recipe", *self.facts.values(), "accuracy", "KL", *self.more], rows, self.title, self.text)

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        found = [record for record in store.part(self.name).values() if "skipped" not in record]
        return {self.name: partial(self.draw, found)} if found else {}

    def draw(self, records: Iterable[dict[str, Any]], figure: Any) -> None:
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


class Tokens(VariantPart):
    name = "tokens"
    title = f"Error at {AT:g} removed and bases by source and number of calibration tokens"
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
        for source in COUNTED:
            for count in COUNTS:
                key = f"{self.name}/{study.inputs.first.name}/{source}/{count}"
                variant = from_source(study, source)
                variant = replace(variant, tokens=replace(variant.tokens, count=count))
                yield Task(key, partial(_tokens, study, source, variant))

    def cells(self, record: dict[str, Any]) -> list[str]:
        cells = []
        for side in SIDE_LABELS:
            for found in (record["bases"][source][side] for source in REFERENCES):
                cells += [f"{100 * found['ratio']:.2f} %", f"{found['angle_degrees']:.2f}"]
            cells.append(f"{100 * record['bases']['cv'][side]:.2f} %")
        return cells

    def line(self, record: dict[str, Any]) -> tuple[str, float]:
        return f"{record['recipe']}, {record['source']}", 100 * record["bases"][REFERENCES[0]]["qk"]["ratio"]


class Pruning(VariantPart):
    name = "pruning"
    title = f"Pruning and K-means at {AT:g} removed (ZDC figure 26)"
    facts: ClassVar = {"share": "share dropped", "kmeans": "centroids"}
    more = ("seconds",)
    x = ("share", "share of the sequences dropped")
    second = "seconds to calibrate"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        plans: dict[str, tuple[float, int | None]] = {f"share-{share:g}": (share, None) for share in SHARES}
        plans |= {f"kmeans-{count}": (0.5, count) for count in CENTROIDS}
        recipe = study.inputs.first
        for label, (share, kmeans) in plans.items():
            key = f"{self.name}/{recipe.name}/{label}"
            variant = replace(of_two_latents(recipe), prune=replace(recipe.prune, share=share, kmeans=kmeans))
            facts = {"recipe": recipe.name, "share": share, "kmeans": kmeans}
            yield Task(key, partial(measure_variant, study, variant, facts, lambda bases: None))

    def cells(self, record: dict[str, Any]) -> list[str]:
        return [f"{sum(record['seconds'].values()):.2f}"]

    def line(self, record: dict[str, Any]) -> tuple[str, float]:
        name = record["recipe"] + (f", {record['kmeans']} centroids" if record["kmeans"] else "")
        return name, sum(record["seconds"].values())


def of_two_latents(recipe: Recipe) -> Recipe:
    """The recipe with a latent for keys and one for values: what looks at one side alone needs a basis of that side."""
    return replace(recipe, groups=replace(recipe.groups, joint=False))


def from_source(study: StudyContext, source: str) -> Recipe:
    """The first recipe with calibration tokens of one of SOURCES."""
    recipe = study.inputs.first
    path = str(study.store.folder / "text" / SPLIT[source]) if source in SPLIT else None
    tokens = replace(recipe.tokens, path=path, **SOURCES[source])
    # The folders hold one split each: with other held-out text, nothing is left out of them.
    return replace(of_two_latents(recipe), tokens=tokens, evaluation=Evaluation())


def write_text(study: StudyContext, source: str) -> None:
    """The documents of a source's third of the held-out text, one file each, unless they are there."""
    folder = study.store.folder / "text" / SPLIT.get(source, "")
    if source in SPLIT and not folder.is_dir():
        folder.mkdir(parents=True)
        for index, document in enumerate(held_out_documents(study.evaluation).texts(SPLIT[source])):
            (folder / f"{index:05d}.txt").write_text(document, "utf-8")


def measure_variant(
    study: StudyContext, recipe: Recipe, facts: dict[str, Any], describe: Callable[[list[LayerBases]], Any]
) -> dict[str, Any]:
    """A point of a calibration that is removed again.

    Args:
        facts: that the record begins with; they name the calibration. describe: gives its `bases`.
    """
    name = f"variant-{'-'.join(map(str, facts.values()))}"
    try:
        evaluator, path = study.path(name, recipe)
        record = {**facts, "seconds": stage_seconds(evaluator.run)}
        plan = path.at_compression(AT)
        if plan is None:
            return {**record, "skipped": f"compression {AT:g} is out of reach"}
        return {**record, **point_record(evaluator.measure(plan)), "bases": describe(bases_of(evaluator.run))}
    except DataError as error:  # fewer tokens than dimensions, or than the text has, or than centroids
        return {**facts, "skipped": error.message}
    finally:
        if (folder := study.store.folder / "runs" / name).is_dir():
            remove(folder, "run")


def _tokens(study: StudyContext, source: str, variant: Recipe) -> dict[str, Any]:
    references = {}
    for reference in REFERENCES:
        write_text(study, reference)
        references[reference] = bases_of(study.run(f"sources/{reference}", from_source(study, reference)))
    write_text(study, source)

    def describe(bases: Sequence[LayerBases]) -> dict[str, Any]:
        compared = {reference: compare_bases(other, bases) for reference, other in references.items()}
        return {**compared, "cv": {side: first_value_variation(bases, side) for side in SIDE_LABELS}}

    facts = {"recipe": variant.name, "source": source, "count": variant.tokens.count}
    return measure_variant(study, variant, facts, describe)


def bases_of(run: Run) -> list[LayerBases]:
    """The bases of each layer, without what W_o is refitted by, which is far larger."""
    return [replace(layer, outputs=None) for layer in run.bases()]


def stage_seconds(run: Run) -> dict[str, float]:
    """Seconds of the stages of a calibration that depend on its tokens and bases."""
    skip = ("check model", "load model", "write")
    return {name: stage["seconds"] for name, stage in run.info["stages"].items() if name not in skip}


def basis_difference(bases: Iterable[Tensor], others: Iterable[Tensor]) -> dict[str, float]:
    """epsilon: mean absolute entry of the first; delta: mean absolute difference, signs of vectors aligned; and their
    ratio. Means over all heads and layers.

    Vectors are compared at norm 1: the papers' bases are orthonormal, those of the closed form are not, and their scale
    goes with the number of tokens. Vectors of (nearly) equal singular values can rotate into each other, which counts
    here as a difference; principal angles do not suffer from it.

    Args:
        bases, others: of each layer [num_groups, dim, channels], of equal shapes.
    Source: FDC section 3.2 (table 2), ZACK section 4.3 (tables 4 and 5).
    """
    sizes, differences = [], []
    for basis, other in zip(bases, others, strict=True):
        basis, other = functional.normalize(basis, dim=-2), functional.normalize(other, dim=-2)
        aligned = other * torch.where((basis * other).sum(-2, keepdim=True) < 0, -1.0, 1.0)
        sizes.append(basis.abs().mean((-2, -1)))
        differences.append((basis - aligned).abs().mean((-2, -1)))
    epsilon, delta = float(torch.cat(sizes).mean()), float(torch.cat(differences).mean())
    return {"epsilon": epsilon, "delta": delta, "ratio": delta / epsilon if epsilon else 0.0}


def compare_bases(bases: Sequence[LayerBases], others: Sequence[LayerBases]) -> dict[str, Any]:
    """Per side: `basis_difference`, and the mean principal angle in degrees of half of the channels."""
    result: dict[str, Any] = {}
    for side in SIDE_LABELS:
        pairs = [(getattr(a, side).encode, getattr(b, side).encode) for a, b in zip(bases, others, strict=True)]
        angles = [np.mean(_angles(a, b, max(1, a.shape[-1] // 2))) for a, b in pairs]
        result[side] = {**basis_difference(*zip(*pairs, strict=True)), "angle_degrees": float(np.mean(angles))}
    return result


def _angles(basis: Tensor, other: Tensor, rank: int) -> np.ndarray:
    """Between the spans of the first `rank` vectors, in degrees, [num_groups, rank]."""
    pairs = zip(basis[..., :rank].double().numpy(), other[..., :rank].double().numpy(), strict=True)
    return np.rad2deg([subspace_angles(first, second) for first, second in pairs])


def first_value_variation(bases: Sequence[LayerBases], side: str) -> float:
    """Standard deviation over mean of the largest singular value of all groups of all layers; 0 if the mean is 0.

    Source: FDC tables 3 and 4, ZACK tables 6 and 7.
    """
    values = torch.cat([getattr(layer, side).singular_values[:, 0] for layer in bases]).double()
    return float(np.nan_to_num(variation(values.numpy())))
