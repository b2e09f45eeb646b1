"""Where a model runs while accuracy is measured."""

from __future__ import annotations

from ...calibration.planning.outline import ModelOutline
from ...models.device_plan import DevicePlan
from ...models.hardware import fit_threads
from ...models.source import Checkpoint
from ...options import MemoryOptions
from ...progress import Progress
from ...recipe import Recipe


def evaluation_plan(checkpoint: Checkpoint, recipe: Recipe, options: MemoryOptions, progress: Progress) -> DevicePlan:
    """Decide by an estimate of the memory that measuring by a recipe takes, which `progress` shows."""
    outline = ModelOutline.of(checkpoint)
    plan = DevicePlan.choose(options, outline.dtype)
    fit_threads(outline.stored_bytes)
    estimates = outline.evaluation(recipe, plan.device, plan.dtype)
    plan, line = plan.within_memory(options.offload, estimates)
    progress.message(line)
    return plan
