"""Placement of a model while accuracy is measured: device, dtype, and whether all its weights are in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...calibration.planning.outline import ModelOutline
from ...models.hardware import fit_threads, pick_device, pick_dtype
from ...models.memory import stream_weights
from ...models.source import Checkpoint
from ...progress import Progress
from ...recipe import Recipe
from ...recipe.settings import Compute
from ..compressible import CompressibleModel


@dataclass(frozen=True)
class Placement:
    """Device, dtype and streaming of a CompressibleModel."""

    device: torch.device
    dtype: torch.dtype
    streamed: bool

    @classmethod
    def choose(cls, checkpoint: Checkpoint, recipe: Recipe, compute: Compute, progress: Progress) -> Placement:
        """Decide by an estimate of memory, which `progress` shows."""
        outline, device = ModelOutline.of(checkpoint), pick_device(compute.device)
        fit_threads(outline.stored_bytes)
        dtype = pick_dtype(compute.dtype, outline.dtype, device)
        stream, line = stream_weights(compute.offload, outline.evaluation(recipe, device, dtype), device)
        progress.message(line)
        return cls(device, dtype, stream)

    def model(self, checkpoint: Checkpoint, workspace: Path) -> CompressibleModel:
        """The model, loaded. `workspace`: a folder on a disk that can hold its hidden states."""
        return CompressibleModel(checkpoint, self.device, self.dtype, streamed=self.streamed, workspace=workspace)
