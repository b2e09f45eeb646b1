"""Memory, disk and products of measuring accuracy, summed over what its stages say of themselves."""

from __future__ import annotations

import torch

from ...calibration.estimate import layer_sizes
from ...calibration.form import model_form
from ...checkpoint.folding import rewriting_bytes
from ...models.hardware import DevicePlan, fit_threads
from ...models.layerwise import activation_bytes
from ...models.memory import EVALUATION_TOKENS, Estimates
from ...models.outline import ModelOutline
from ...models.source import Checkpoint
from ...options import MemoryOptions
from ...progress import Progress
from ...recipe.metric_registry import primitive_metrics, report_metrics
from ...recipe.recipe import Recipe
from .prompts import prompt_tokens
from .scoring import scoring_bytes


def evaluation_estimates(outline: ModelOutline, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Estimates:
    """Estimate the memory of measuring accuracy (`rotor export --accuracy`), with one rewritten layer at a time."""
    spec, shape = recipe.evaluation, outline.shape
    sizes = [
        (layer_shape, form._replace(joint=False))
        for layer_shape, _, form in layer_sizes(shape, model_form(recipe, shape))
    ]
    activations = [
        activation_bytes(layer_shape, outline.text_config, EVALUATION_TOKENS[device.type], dtype.itemsize)
        for layer_shape, _ in sizes
    ]
    work = {"activations": max(*activations, scoring_bytes(device, outline.text_config.vocab_size))}
    searched = spec.search_tokens + prompt_tokens(spec, primitive_metrics(spec.metric))
    reported = spec.report_tokens + prompt_tokens(spec, report_metrics(spec.metric))
    disk = 3 * max(searched, reported) * shape.hidden_size * dtype.itemsize  # hidden states
    host = {
        "rewriting one layer": max(
            rewriting_bytes(layer_shape, form, recipe.bases.refit) for layer_shape, form in sizes
        )
    }
    copied = sum(count * layer_shape.projection_elements for layer_shape, count in shape.sizes.items())
    return outline.estimates(device, dtype, host, work, (disk, 0), copied)


def evaluation_flops(outline: ModelOutline, recipe: Recipe) -> dict[str, float]:
    """Count FLOPs of the large matrix products of `rotor export --accuracy`: `search` and `report`.

    Both run the uncompressed model once and a compressed one, whose layers count like the uncompressed ones: the search
    at each of the usual number of points. `rotor validate` takes the report's.
    """
    spec = recipe.evaluation
    search = outline.pass_flops(spec.search_tokens, prompt_tokens(spec, primitive_metrics(spec.metric)))
    report = outline.pass_flops(spec.report_tokens, prompt_tokens(spec, report_metrics(spec.metric)))
    divergence = outline.pass_flops(spec.report_tokens) - outline.pass_flops(0, spec.report_tokens)  # the head alone
    return {"search": (1 + recipe.search.points(recipe.coded)) * search, "report": 2 * report + divergence}


def evaluation_plan(checkpoint: Checkpoint, recipe: Recipe, options: MemoryOptions, progress: Progress) -> DevicePlan:
    """Decide where a model runs while accuracy is measured, by an estimate of its memory, which `progress` shows."""
    outline = ModelOutline.of(checkpoint)
    plan = DevicePlan.choose(options, outline.dtype)
    fit_threads(outline.stored_bytes)
    plan, line = plan.within_memory(options.offload, evaluation_estimates(outline, recipe, plan.device, plan.dtype))
    progress.message(line)
    return plan
