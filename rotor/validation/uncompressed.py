"""An uncompressed model whose cache follows a policy, measured against itself with a plain cache."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..data.splits import evaluation_data
from ..errors import CheckpointError, UsageError
from ..evaluation.fidelity import FidelityMeter
from ..evaluation.metrics import EvaluationContext
from ..evaluation.placement import Placement
from ..models.checkpoint import Checkpoint
from ..models.layerwise import LayerwiseModel
from ..models.loading import weights_of
from ..policies import Policy, cache_policy, stored_bytes
from ..progress import Progress, StageTimes
from ..recipe import Recipe
from ..recipe.settings import Compute
from .integrity import Validation


def validate_uncompressed(
    folder: Path, cache: str, policy: Policy, recipe: Recipe, compute: Compute, progress: Progress
) -> Validation:
    """Accuracy on the report split and bytes of the cache of a row, with the policy against without.

    Text is read as where a checkpoint with a policy is measured: a prompt, then step by step through the cache. What a
    policy finds on text it finds on the search split.

    Args:
        cache: what the policy is called. recipe: whose section evaluation says how accuracy is measured.
    Raises:
        CheckpointError: no tokenizer. UsageError: not all weights fit in memory, or the policy cannot serve the model.
    """
    result, times, checkpoint = Validation(folder), StageTimes(), Checkpoint(folder)
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"{folder}: no tokenizer to read text with.", "Add tokenizer.json.")
    place = Placement.choose(checkpoint, recipe, compute, progress)
    if place.streamed:
        raise UsageError(f"--cache {cache}: needs all weights in memory.", "Give --offload never, or a smaller model.")
    with times.stage("accuracy"):
        data = evaluation_data(recipe.evaluation, checkpoint.config, checkpoint.tokenizer)
        network = LayerwiseModel(weights_of(checkpoint, place.device, place.dtype, False))
        context = EvaluationContext(recipe.evaluation, data.rows, checkpoint.tokenizer, checkpoint.config)
        meter = FidelityMeter(context, progress, policy)
        meter.measure_base(network, "report")
        fitted = meter.fitted_policy(network)
        found = meter.measure(network, "report")
    network.model.to(checkpoint.config.dtype or torch.float32)
    rows = data.report[:1].to(place.device)
    before, after = (_bytes_per_token(network, rows, used) for used in (None, fitted))
    stored = round(1 - after / before, 6)
    result.summary = {
        "recipe": cache,
        "compression": {"stored": stored},
        "kv_bytes_per_token": {"before": round(before), "after": after, "tokens": rows.shape[1]},
        "accuracy": {
            "metric": meter.metric,
            "value": found.accuracy,
            "interval_95": None if found.interval is None else list(found.interval),
            "target": None,
            **found.values,
            "left_out": meter.left_out["report"],
            "data": data.description,
        },
    }
    result.seconds = times.seconds
    return result


@torch.inference_mode()
def _bytes_per_token(network: LayerwiseModel, rows: Tensor, policy: Policy | None) -> float:
    """Of the cache behind a row that is read at once."""
    cache = DynamicCache(config=network.config)
    with cache_policy(network.model, policy):
        network.model(input_ids=rows, past_key_values=cache, use_cache=True)
    return stored_bytes(cache) / rows.numel()
