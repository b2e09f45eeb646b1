"""What a study would do: its parts with the calibrations and points that they still need, and how long these take.

Counts are of what `StudyParts` does for records that are not there yet. Seconds are those of the large matrix products
alone, at a rate that is measured for a fraction of a second; everything else comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..calibration.candidates import wanted_moments
from ..calibration.outline import ModelOutline
from ..evaluation.placement import Placement
from ..models.checkpoint import Checkpoint
from ..models.estimate import calibration_flops, forward_flops, measured_tokens, prompt_tokens
from ..models.hardware import matmul_rate
from ..recipe import Recipe, override
from ..search.search import most_points
from . import parts
from .cache_plans import quantisers
from .caches_part import alone, budgeted, combinations, evicted, sensitive
from .front import CHANGES, WEIGHTS
from .parts import reads_tokens
from .peers import peers
from .peers_part import SHARES
from .tiers_codes import coded_labels
from .tiers_part import labels

VARIANTS = ("random", "random-1", "text", "other-text", "synthetic")
COUNTED = ("random", "text", "synthetic")
"""Of them, those that the part `tokens` measures at each number of tokens."""


@dataclass(frozen=True)
class PartOutlook:
    """What one part still needs.

    points: measurements of compressed models. seconds: of the matrix products.
    """

    part: str
    calibrations: int
    points: int
    seconds: float


@dataclass(frozen=True)
class StudyOutlook:
    """What a study would do. known_records: that are there already. not_run: parts that it was not asked for."""

    model: str
    folder: str
    recipes: list[str]
    parts: list[PartOutlook]
    not_run: list[str]
    known_records: int
    device: str
    dtype: str

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 1)}


@dataclass
class Tally:
    """Work of one part, counted. calibrations: recipes. whole, searched: points on both splits, on the search split."""

    calibrations: list[Recipe]
    whole: int = 0
    searched: int = 0
    small: int = 0

    @classmethod
    def empty(cls) -> Tally:
        return cls([])


class Outlook:
    """Counts what the parts of a study need that is not there.

    Args:
        records: keys of those that are there. folder: the study's. at: its fixed compression.
    """

    def __init__(self, records: Collection[str], folder: Path, at: float) -> None:
        self.records, self.folder, self.at = records, folder, at
        self._planned: set[str] = set()

    def curve(self, tally: Tally, part: str, name: str, recipe: Recipe, folder: str) -> None:
        keys = [f"{part}/{name}/{key}" for key in ("spectra", "targets", *(f"p{p:.2f}" for p in parts.COMPRESSIONS))]
        missing = [key for key in keys if key not in self.records]
        if not missing:
            return
        self._run(tally, folder, recipe)
        tally.whole += sum("/p" in key for key in missing)
        if keys[1] in missing:
            tally.whole += len(parts.TARGETS)
            tally.searched += len(parts.TARGETS) * (most_points(recipe.search.resolution) - 1)

    def sources(self, tally: Tally, name: str, recipe: Recipe) -> None:
        if f"sources/{name}" not in self.records and reads_tokens(recipe):
            for variant in VARIANTS:
                self._run(tally, f"sources/{name}/{variant}", _from(recipe, variant))

    def tokens(self, tally: Tally, name: str, recipe: Recipe, counts: tuple[int, ...]) -> None:
        keys = [(s, n) for s in COUNTED for n in counts if f"tokens/{name}/{s}/{n}/p{self.at:.2f}" not in self.records]
        if not keys or not reads_tokens(recipe):
            return
        self._run(tally, f"sources/{name}/other-text", _from(recipe, "other-text"))
        for source, count in keys:
            variant = _from(recipe, source)
            tally.calibrations.append(replace(variant, tokens=replace(variant.tokens, count=count)))
        tally.whole += len(keys)

    def degradation(self, tally: Tally, name: str, recipe: Recipe) -> None:
        keys = [f"degradation/{name}/{side}/p{p:.2f}" for side in ("qk", "vo") for p in parts.COMPRESSIONS]
        missing = [key for key in keys if key not in self.records]
        if missing:
            self._run(tally, f"sources/{name}/text", _from(recipe, "text"))
            tally.small += len(missing)

    def front(self, tally: Tally, name: str, recipe: Recipe) -> None:
        missing = [weight for weight in WEIGHTS if f"front/{name}/w{weight:.2f}" not in self.records]
        if missing:
            self._run(tally, f"front/{name}", override(recipe, CHANGES))
            tally.whole += len(missing) * len(parts.TARGETS)
            tally.searched += len(missing) * len(parts.TARGETS) * (most_points(recipe.search.resolution) - 1)

    def peers(self, tally: Tally, recipes: dict[str, Recipe], sizes: Collection[int] | None) -> None:
        """Sizes by default are shares of the uncompressed model's bytes, of which there are as many."""
        tally.whole += sum(f"peers/{peer.name}" not in self.records for peer in peers())
        known = [key for key in self.records if key.startswith("peers/")]
        for name, recipe in recipes.items():
            done = sum(key.startswith(f"peers/{name}, ") and key.endswith(" bytes") for key in known)
            missing = max(0, len(SHARES if sizes is None else sizes) - done)
            if missing:
                self._run(tally, name, recipe)
                tally.whole += missing

    def caches(self, tally: Tally, part: str, recipes: dict[str, Recipe]) -> None:
        """One of CACHE_PARTS; probes of single layers for `budgets` come on top."""
        named = {"quantise": quantisers, "evict": evicted, "budgets": budgeted, "combine": alone}[part]()
        tally.whole += sum(f"{part}/{name}" not in self.records for name in named)
        if part == "budgets":
            tally.whole += sum(f"budgets/{name}, by sensitivity" not in self.records for name in sensitive())
        if part != "combine":
            return
        for name, recipe in recipes.items():
            labels = [label for plans in combinations(name, recipe.coded) for label in plans]
            missing = sum(f"combine/{label}" not in self.records for label in labels)
            if missing:
                self._run(tally, name, recipe)
                tally.whole += missing

    def tiers(self, tally: Tally, name: str, recipe: Recipe) -> None:
        """Records alone; the choices that lead to them are measured on few tokens."""
        named = coded_labels() if recipe.coded else labels()
        missing = sum(f"tiers/{name}/records/{label}" not in self.records for label in named)
        if missing:
            self._run(tally, name, recipe)
            tally.whole += missing

    def _run(self, tally: Tally, name: str, recipe: Recipe) -> None:
        """A calibration that is kept, and so is made once."""
        if name not in self._planned and not (self.folder / "runs" / name).is_dir():
            self._planned.add(name)
            tally.calibrations.append(recipe)


def _from(recipe: Recipe, variant: str) -> Recipe:
    source = {"random-1": "random", "other-text": "text"}.get(variant, variant)
    return replace(recipe, tokens=replace(recipe.tokens, source=source))  # type: ignore[arg-type]


class Timer:
    """Seconds of the matrix products of calibrations and of points."""

    def __init__(self, checkpoint: Checkpoint, placement: Placement, recipe: Recipe) -> None:
        self.outline, self.placement, self.evaluation = ModelOutline.of(checkpoint), placement, recipe.evaluation

    @cached_property
    def rate(self) -> float:
        return matmul_rate(self.placement.device, self.placement.dtype)

    @cached_property
    def rate64(self) -> float:
        return matmul_rate(torch.device("cpu"), torch.float64)

    def seconds(self, tally: Tally) -> float:
        search = measured_tokens(self.evaluation)
        whole = search + self.evaluation.report_tokens + prompt_tokens(self.evaluation)
        tokens = tally.whole * whole + tally.searched * search + tally.small * 3 * parts.HELD_OUT_TOKENS
        tokens += whole if tally.whole else 0  # the uncompressed model
        found = forward_flops(self.outline.sizes, tokens, head=True) / self.rate
        return round(found + sum(map(self._calibration, tally.calibrations)), 1)

    def _calibration(self, recipe: Recipe) -> float:
        outline = self.outline
        candidates = outline.candidates(recipe)
        size = max(candidate.group_size for candidate in candidates.values())
        wanted = wanted_moments(recipe, candidates)
        flops = calibration_flops(outline.sizes, outline.shape, recipe, size, wanted)
        return sum(count / (self.rate64 if name == "statistics" else self.rate) for name, count in flops.items())


def part_outlook(part: str, timer: Timer, count: Callable[[Tally], None]) -> PartOutlook:
    """Count a part's work, and time it."""
    tally = Tally.empty()
    count(tally)
    points = tally.whole + tally.searched + tally.small
    return PartOutlook(part, len(tally.calibrations), points, timer.seconds(tally))
