"""Where a model runs while accuracy is measured: device, dtype, and whether all its weights are in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .candidates import candidates
from .checkpoint import Checkpoint
from .compress import CompressibleModel, pick_device, pick_dtype
from .estimate import Estimate, WeightSizes, evaluation_estimate, feed_forward_width, weight_sizes
from .families import attention_shape, find_family
from .memory import check_offload, stream_weights
from .progress import Progress
from .recipe import LM_EVAL, Recipe


@dataclass(frozen=True)
class Placement:
    """What CompressibleModel is told."""

    device: torch.device
    dtype: torch.dtype
    streamed: bool
    device_map: str | None

    @classmethod
    def choose(
        cls,
        checkpoint: Checkpoint,
        recipe: Recipe,
        device: str,
        dtype: str,
        offload: str,
        device_map: str | None,
        progress: Progress,
    ) -> Placement:
        """By an estimate of memory, which is told to `progress`.

        Raises:
            UsageError: the metric or the device map needs the whole model in memory, and it is not to be there.
        """
        target = pick_device(device)
        compute_dtype = pick_dtype(dtype, checkpoint.config.dtype or torch.float32, target)
        whole, instead = None, ""
        if recipe.evaluation.metric.startswith(LM_EVAL):
            whole, instead = f"evaluation.metric {recipe.evaluation.metric}", "Choose another metric, e.g. kl_div."
        elif device_map is not None:
            whole, instead = f"--device-map {device_map}", "Leave it out."
        resident, streamed = evaluation_estimates(checkpoint, recipe, target, compute_dtype)
        stream, line = stream_weights(check_offload(offload), resident, streamed, target, 1, whole, instead)
        progress.message(line)
        return cls(target, compute_dtype, stream, device_map)

    def model(self, checkpoint: Checkpoint, workspace: Path) -> CompressibleModel:
        """The model, loaded. `workspace`: a folder on a disk that can hold its hidden states."""
        return CompressibleModel(
            checkpoint,
            self.device,
            self.dtype,
            streamed=self.streamed,
            device_map=self.device_map,
            workspace=workspace,
        )


def evaluation_estimates(
    checkpoint: Checkpoint, recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> tuple[Estimate, Estimate]:
    """What measuring takes with all weights in memory, and with one layer of them at a time."""
    config, family, shape = checkpoint.config, find_family(checkpoint.config), attention_shape(checkpoint.config)
    sizes = model_sizes(checkpoint)

    def estimate(streamed: bool) -> Estimate:
        return evaluation_estimate(
            sizes,
            shape,
            recipe,
            candidates(recipe, family, shape),
            feed_forward=feed_forward_width(config),
            compute_bytes=dtype.itemsize,
            streamed=streamed,
            vocab_size=int(config.vocab_size),
            on_gpu=device.type == "cuda",
        )

    return estimate(False), estimate(True)


def model_sizes(checkpoint: Checkpoint) -> WeightSizes:
    """From the headers of a checkpoint's shards."""
    config = checkpoint.config
    shapes = {name: checkpoint.shape_of(name) for name in checkpoint.names}
    family, shape = find_family(config), attention_shape(config)
    return weight_sizes(shapes, checkpoint.total_bytes(), family, shape, int(config.vocab_size))
