"""A calibration request, checked against the model before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..data.readiness import check_text
from ..format.layout import AttentionShape, LayerForm
from ..format.places import OutputFolder
from ..models.checkpoint import Checkpoint
from ..models.hardware import pick_device, pick_dtype
from ..models.hub import ModelSource, find_source
from ..models.memory import Estimates, stream_weights
from ..recipe import Recipe
from ..recipe.settings import CalibrationSettings
from ..runtime.families import Family
from .outline import ModelOutline, needs_whole_model, wanted_moments


@dataclass(frozen=True)
class CalibrationJob:
    """A calibration request, with everything that is known before any work."""

    settings: CalibrationSettings
    out: OutputFolder
    source: ModelSource
    checkpoint: Checkpoint
    outline: ModelOutline
    recipe: Recipe
    form: LayerForm
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def check(cls, settings: CalibrationSettings) -> CalibrationJob:
        """Raises RotorError where the request cannot be carried out."""
        recipe, out = settings.check(), OutputFolder.at(settings.out, "run")
        source = find_source(settings.model, settings.revision)
        checkpoint = Checkpoint(source.folder)
        outline = ModelOutline.of(checkpoint)
        form = outline.form(recipe)
        device = pick_device(settings.compute.device)
        job = cls(
            settings,
            out,
            source,
            checkpoint,
            outline,
            recipe,
            form,
            device,
            pick_dtype(settings.compute.dtype, outline.dtype, device),
        )
        job.check_out()
        check_text(recipe, checkpoint.config, checkpoint.tokenizer)  # also refuses a tokenizer that does not load
        return job

    def check_out(self) -> None:
        """Raises UsageError where the run folder must not be written."""
        text = self.recipe.tokens.path
        self.out.check(self.settings.overwrite, [self.source.folder], [] if text is None else [Path(text)])

    @property
    def wanted(self) -> frozenset[str]:
        """Names of the moments."""
        return wanted_moments(self.recipe, self.form)

    @property
    def family(self) -> Family:
        return self.outline.family

    @property
    def shape(self) -> AttentionShape:
        return self.outline.shape

    def streams(self) -> tuple[bool, str]:
        """Whether weights are read layer by layer, and the estimate in words; raises UsageError if they cannot be."""
        offload, whole = self.settings.compute.offload, needs_whole_model(self.recipe)
        return stream_weights(offload, self.estimates(), self.device, whole)

    def estimates(self) -> Estimates:
        return self.outline.calibration(self.recipe, self.device, self.dtype, self.settings.batch_tokens)
