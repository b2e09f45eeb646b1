"""What a study would do: the calibrations and points that its parts still need, and how long these take.

Seconds are those of the large matrix products alone, at a rate that is measured for a fraction of a second; everything
else comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from ..calibration.candidates import wanted_moments
from ..calibration.outline import ModelOutline
from ..models.estimate import calibration_flops, forward_flops, measured_tokens, prompt_tokens
from ..models.hardware import matmul_rate
from ..recipe import Recipe
from .context import StudyContext
from .part import Part, Task
from .parts import PARTS


@dataclass(frozen=True)
class PartEstimate:
    """What one part still needs. points: measurements of compressed models. seconds: of the matrix products."""

    part: str
    calibrations: int
    points: int
    seconds: float


@dataclass(frozen=True)
class StudyEstimate:
    """What a study would do. known_records: that are there already. not_run: parts that it was not asked for."""

    model: str
    folder: str
    recipes: list[str]
    parts: list[PartEstimate]
    not_run: list[str]
    known_records: int
    device: str
    dtype: str

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 1)}


def estimate_study(study: StudyContext, chosen: Sequence[Part]) -> StudyEstimate:
    """Count what the parts of a study need that is not there; nothing is calibrated, measured or written."""
    parts, records, known = list[PartEstimate](), study.store.records, set[str]()
    rate = cache(matmul_rate)
    for part in chosen:
        tasks = [task for task in part.tasks(study) if task.key not in known and not task.is_done(records)]
        runs = {name: recipe for task in tasks for name, recipe in task.calibrations.items()}
        missing = [r for name, r in runs.items() if name not in known and not study.folder(name).is_dir()]
        known |= {task.key for task in tasks} | set(runs)
        seconds = _measured_flops(study, tasks) / rate(study.placement.device, study.placement.dtype)
        for stage, flops in (item for recipe in missing for item in _calibration_flops(study, recipe).items()):
            in_float64 = (torch.device("cpu"), torch.float64)
            seconds += flops / rate(
                *(in_float64 if stage == "statistics" else (study.placement.device, study.placement.dtype))
            )
        points = sum(task.points + task.search_points for task in tasks)
        parts.append(PartEstimate(part.name, len(missing), points, round(seconds, 1)))
    return StudyEstimate(
        study.store.settings["model"]["name"],
        str(study.store.folder),
        list(study.plan.recipes),
        parts,
        [name for name in PARTS if name not in [part.part for part in parts]],
        len(records),
        str(study.placement.device),
        str(study.placement.dtype).removeprefix("torch."),
    )


def _measured_flops(study: StudyContext, tasks: Sequence[Task]) -> float:
    """Of the points of tasks, and of the uncompressed model."""
    search = measured_tokens(study.evaluation)
    whole = search + study.evaluation.report_tokens + prompt_tokens(study.evaluation)
    tokens = sum(task.tokens or task.points * whole + task.search_points * search for task in tasks)
    sizes = ModelOutline.of(study.checkpoint).sizes
    return forward_flops(sizes, tokens + (whole if tokens else 0), head=True)


def _calibration_flops(study: StudyContext, recipe: Recipe) -> dict[str, float]:
    outline = ModelOutline.of(study.checkpoint)
    candidates = outline.candidates(recipe)
    size = max(candidate.group_size for candidate in candidates.values())
    return calibration_flops(outline.sizes, outline.shape, recipe, size, wanted_moments(recipe, candidates))
