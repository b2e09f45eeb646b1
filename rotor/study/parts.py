"""The parts of a study: each adds the records that the store does not have yet."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from ..allocation.plan import RankPath
from ..bases.layer import LayerBases
from ..bases.registry import sides_that_read_tokens
from ..calibration.calibrate import calibrate
from ..calibration.partial import PartialRun
from ..calibration.run import Run
from ..data.splits import held_out_documents
from ..errors import AccuracyError, DataError, UsageError
from ..format.places import OutputFolder, remove
from ..progress import Progress
from ..recipe import Evaluation, Recipe, override
from ..search.search import Measurer, search_target
from .caches_part import CachesPart
from .comparison import (
    SIDES,
    basis_difference,
    coefficient_of_variation,
    encoders,
    largest_singular_values,
    mean_spectrum,
    principal_angles,
)
from .front import CHANGES, measure_front
from .measure import StudySubject, target_record, uniform_ranks
from .peers_part import PeersPart
from .store import StudyStore
from .tiers_part import TiersPart

COMPRESSIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
TARGETS = (0.99, 0.95, 0.90)
ANGLE_SHARES = (0.25, 0.5)
"""Shares of the columns that are kept where subspaces are compared."""

HELD_OUT_TOKENS = 2048
"""Tokens of each part of the held-out data on which degradation is measured (ZDC section 4.3)."""


class StudyParts:
    """Runs the parts of a study; each method adds the records that the store does not have yet."""

    def __init__(
        self, subject: StudySubject, store: StudyStore, progress: Progress, calibrate_options: dict[str, Any], at: float
    ) -> None:
        self.subject, self.store, self.progress, self.at = subject, store, progress, at
        self._calibrate_options = calibrate_options
        self._caches: CachesPart | None = None

    def curve(self, part: str, name: str, recipe: Recipe, folder: str) -> None:
        """Spectra, points over compression, and the largest compression at each target accuracy."""
        keys = [f"{part}/{name}/{key}" for key in ("spectra", "targets", *(f"p{p:.2f}" for p in COMPRESSIONS))]
        if all(self.store.get(key) for key in keys):
            return
        run = self._run(folder, recipe)
        if not self.store.get(keys[0]):
            self.store.put(keys[0], {**_spectra(_first_candidates(run)), "seconds": _seconds(run)})
        measurer = self.subject.measurer(run, recipe)
        path = measurer.path(recipe)
        last: dict[str, Any] = {}  # neighbours may be one step of the path
        for key, target in zip(keys[2:], COMPRESSIONS, strict=True):
            if self.store.get(key):
                continue
            plan = path.at_compression(target)
            if plan is None:
                self.store.put(key, {"target": target, "out_of_reach": round(path.steps()[-1].stored, 6)})
                continue
            same = last.get("stored") == round(plan.stored, 6)
            point = last if same else self.subject.point(measurer, plan)
            last = self.store.put(key, {**point, "target": target})
            report = last["report"]
            self.progress.message(
                f"{name} at {target:g}: accuracy {report['accuracy']:.4f}, KL {report['kl_div']:.5f} (report split)"
            )
        if not self.store.get(keys[1]):
            found = {f"{target:.2f}": _at_target(measurer, path, recipe, target) for target in TARGETS}
            self.store.put(keys[1], found)

    def sources(self, name: str, recipe: Recipe) -> None:
        """Bases of one recipe from different calibration tokens, against each other."""
        if not self._reads_tokens(name, recipe, "sources"):
            return
        variants = self._token_variants(recipe)
        key = f"sources/{name}"
        found = self.store.get(key)
        if found and set(found["variants"]) == set(variants):
            return
        runs = {source: self._variant_run(name, source, variant) for source, variant in variants.items()}
        bases = {source: _first_candidates(run) for source, run in runs.items()}
        cv = {
            source: {side: coefficient_of_variation(largest_singular_values(layers, side)) for side in SIDES}
            for source, layers in bases.items()
        }
        self.store.put(
            key,
            {
                "variants": {s: {"tokens": runs[s].info["tokens"]["count"], "cv": cv[s]} for s in variants},
                "pairs": [{"a": a, "b": b, **compare_bases(bases[a], bases[b])} for a, b in combinations(variants, 2)],
            },
        )

    def tokens(self, name: str, recipe: Recipe, counts: tuple[int, ...]) -> None:
        """Error at one compression, and distance of the bases to those from other text, by number of tokens."""
        if not self._reads_tokens(name, recipe, "tokens"):
            return
        variants = self._token_variants(recipe)
        reference: list[LayerBases] | None = None
        for source in (s for s in variants if s not in ("random-1", "other-text")):
            for count in counts:
                key = f"tokens/{name}/{source}/{count}/p{self.at:.2f}"
                if self.store.get(key):
                    continue
                if reference is None:
                    reference = _first_candidates(self._variant_run(name, "other-text", variants["other-text"]))
                variant = replace(variants[source], tokens=replace(variants[source].tokens, count=count))
                facts = {"recipe": name, "source": source, "count": count}
                try:
                    self._measure_variant(key, variant, facts, reference)
                except DataError as error:  # fewer tokens than dimensions, or than the text has
                    self.store.put(key, {**facts, "skipped": error.message})

    def degradation(self, name: str, recipe: Recipe) -> None:
        """Relative change of the attention outputs against p of one side, on the text calibrated on and on other text.

        Source: ZDC figure 14.
        """
        keys = {(side, p): f"degradation/{name}/{side}/p{p:.2f}" for side in SIDES for p in COMPRESSIONS}
        if all(self.store.get(key) for key in keys.values()):
            return
        bases = _first_candidates(self._variant_run(name, "text", self._token_variants(recipe)["text"]))
        data = self.subject.data
        rows = max(1, HELD_OUT_TOKENS // data.report.shape[1])
        own, parts = self.subject.calibration_rows(2 * rows), data.report[: 2 * rows].split(rows)
        with self.progress.task("degradation", len(keys), "points") as advance:
            for (side, p), key in keys.items():
                if not self.store.get(key):
                    ranks = uniform_ranks(bases, p, side)
                    held_out = [self.subject.degradation(bases, ranks, part) for part in parts]
                    calibration = self.subject.degradation(bases, ranks, own)
                    self.store.put(key, {"p": p, "side": side, "calibration": calibration, "held_out": held_out})
                advance(1)

    def front(self, name: str, recipe: Recipe) -> None:
        """Bytes of cache against predicted decode time, where the ranks choose form and group size of every layer."""
        free = override(recipe, CHANGES)
        measure_front(self.subject, self.store, name, free, self._run(f"front/{name}", free), TARGETS)

    def peers(self, recipes: Mapping[str, Recipe], sizes: Sequence[int] | None) -> None:
        """Quantisers of the cache, and the recipes at numbers of bytes, each scored through a cache that is used."""
        part = PeersPart(self.subject, self.store, sizes)
        part.quantisers()
        for name, recipe in recipes.items():
            part.recipe(name, recipe, partial(self._run, name, recipe))

    def caches(self, part: str, recipes: Mapping[str, Recipe]) -> None:
        """One of CACHE_PARTS: policies of the cache, of the uncompressed model and on top of the recipes' rows."""
        if self._caches is None:
            self._caches = CachesPart(self.subject, self.store, None)
        if part == "combine":
            for name, recipe in recipes.items():
                self._caches.combine(name, recipe, partial(self._run, name, recipe))
        else:
            getattr(self._caches, part)()

    def tiers(self, name: str, recipe: Recipe) -> None:
        """Ratios per token of a recipe's bases against one ratio.

        Source: ZDC section 5.2.
        """
        TiersPart(self.subject, self.store, None).measure(name, recipe, partial(self._run, name, recipe))

    def _reads_tokens(self, name: str, recipe: Recipe, part: str) -> bool:
        """Whether calibration tokens decide anything of a recipe; if not, it says so: there is nothing to measure."""
        if reads_tokens(recipe):
            return True
        self.progress.message(f"{part}: {name} takes bases and ranks from the weights alone; no tokens change it")
        return False

    def _measure_variant(
        self, key: str, recipe: Recipe, facts: dict[str, Any], reference: list[LayerBases] | None
    ) -> None:
        """Calibrate into a folder that is removed again, and record a point at the study's fixed compression."""
        folder = self.store.folder / "runs" / "variant"
        try:
            run = calibrate(self.subject.checkpoint.folder, folder, recipe, overwrite=True, **self._calibrate_options)
            measurer = self.subject.measurer(run, recipe)
            plan = measurer.path(recipe).at_compression(self.at)
            record = {**facts, "seconds": _seconds(run)}
            if plan is None:
                self.store.put(key, {**record, "skipped": f"compression {self.at:g} is out of reach"})
                return
            record |= self.subject.point(measurer, plan)
            bases = _first_candidates(run)
            record["bases"] = _spectra(bases) if reference is None else compare_bases(reference, bases)
            self.store.put(key, record)
            self.progress.message(f"{key}: KL {record['report']['kl_div']:.5f} (report split)")
        finally:
            if folder.is_dir():
                remove(folder, "run")

    def _token_variants(self, recipe: Recipe) -> dict[str, Recipe]:
        """Variants of the recipe by their calibration tokens.

        Random tokens of two seeds, text of the third of the documents that is kept for it, and text that the model
        writes; `other-text` is of the report third, so that its bases are only compared with and never measured.
        """
        tokens = recipe.tokens
        variants = {
            "random": replace(tokens, source="random", path=None, seed=0),
            "random-1": replace(tokens, source="random", path=None, seed=1),
            "text": replace(tokens, source="text", path=str(self._text(recipe, "calibration"))),
            "other-text": replace(tokens, source="text", path=str(self._text(recipe, "report"))),
            "synthetic": replace(tokens, source="synthetic", path=None),
        }
        # The folders hold one split each: with other held-out text, nothing is left out of them.
        apart = Evaluation()
        two = _of_two_latents(recipe)
        return {s: replace(two, tokens=changed, evaluation=apart) for s, changed in variants.items()}

    def _text(self, recipe: Recipe, split: str) -> Path:
        """A folder with the documents of a third of the held-out text, one file each."""
        folder = self.store.folder / "text" / split
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=f".{split}-", dir=folder.parent))
            documents = held_out_documents(recipe.evaluation)
            for index, document in enumerate(getattr(documents, split)):
                (staging / f"{index:05d}.txt").write_text(document, "utf-8")
            staging.rename(folder)
        return folder

    def _variant_run(self, name: str, source: str, recipe: Recipe) -> Run:
        return self._run(f"sources/{name}/{source}", recipe)

    def _run(self, name: str, recipe: Recipe) -> Run:
        """The run of a recipe, calibrated unless it is there.

        Raises:
            UsageError: the folder holds a run of another recipe or model.
        """
        folder = self.store.folder / "runs" / name
        if not folder.exists():
            self.progress.message(f"calibrate {name}")
            begun = PartialRun(OutputFolder.at(folder, "run")).exists
            return calibrate(self.subject.checkpoint.folder, folder, recipe, resume=begun, **self._calibrate_options)
        run = Run.open(folder)
        same_model = run.info["model"].get("shards") == self.store.settings["model"]["shards"]
        if not same_model or _without_path(run.recipe) != _without_path(recipe):
            raise UsageError(
                f"{folder}: was calibrated for another {'recipe' if same_model else 'model'}.",
                "Delete it, and the study calibrates again.",
            )
        return run


def _of_two_latents(recipe: Recipe) -> Recipe:
    """The recipe with a latent for keys and one for values: what looks at one side alone needs a basis of that side."""
    return replace(recipe, groups=replace(recipe.groups, joint=False))


def reads_tokens(recipe: Recipe) -> bool:
    """Whether calibration tokens decide anything of a recipe: of its bases, bits or ranks."""
    sides = sides_that_read_tokens(recipe.bases.qk, recipe.bases.vo)
    return bool(sides) or recipe.coded or recipe.bases.refit or "gradients" in recipe.rank_needs


def _first_candidates(run: Run) -> list[LayerBases]:
    """The bases of each layer's first candidate: the only one, unless the recipe leaves the choice to the ranks.

    Without the moments that serve the refit, which are far larger.
    """
    return [replace(next(iter(layer.values())), outputs=None) for layer in run.bases()]


def compare_bases(bases: list[LayerBases], others: list[LayerBases]) -> dict[str, Any]:
    """Per side: epsilon, delta, their ratio, and the mean and largest principal angles in degrees at ANGLE_SHARES."""
    result: dict[str, Any] = {}
    for side in SIDES:
        first, second = encoders(bases, side), encoders(others, side)
        difference = basis_difference(first, second)
        angles = {}
        for share in ANGLE_SHARES:
            kept = [
                principal_angles(a, b, max(1, round(share * a.shape[-1]))).rad2deg()
                for a, b in zip(first, second, strict=True)
            ]
            angles[f"{share:g}"] = {
                "mean": round(sum(float(a.mean()) for a in kept) / len(kept), 4),
                "largest": round(max(float(a.max()) for a in kept), 4),
            }
        result[side] = {
            "epsilon": difference.epsilon,
            "delta": difference.delta,
            "ratio": difference.ratio,
            "angles_degrees": angles,
        }
    return result


def _spectra(bases: list[LayerBases]) -> dict[str, list[float]]:
    return {side: [round(value, 8) for value in mean_spectrum(bases, side).tolist()] for side in SIDES}


def _seconds(run: Run) -> dict[str, float]:
    """Seconds of the stages of a calibration that depend on its tokens and bases."""
    skip = ("check model", "load model", "write")
    return {name: stage["seconds"] for name, stage in run.info["stages"].items() if name not in skip}


def _at_target(measurer: Measurer, path: RankPath, recipe: Recipe, target: float) -> dict[str, Any]:
    """The point that `rotor export --accuracy` would choose."""
    try:
        plan = search_target(measurer.table, path, recipe, target, measurer.search)
    except AccuracyError as error:
        return {"out_of_reach": error.message}
    return target_record(measurer.measure(plan))


def _without_path(recipe: Recipe) -> dict[str, Any]:
    """Settings of a recipe but where its text lies, as the study's folder may be named in several ways."""
    data = recipe.to_dict()
    data["tokens"] = {key: value for key, value in data["tokens"].items() if key != "path"}
    return data
