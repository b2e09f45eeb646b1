"""A model as far as its configuration and the headers of its shards tell: sizes, and what work on it will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..format.layout import AttentionShape
from ..models.checkpoint import Checkpoint
from ..models.estimate import (
    Estimates,
    ForwardPass,
    WeightSizes,
    calibration_estimates,
    evaluation_estimates,
    feed_forward_width,
    weight_sizes,
)
from ..models.memory import WholeModel
from ..models.projections import longest_row
from ..models.rotary_frequencies import rotary_frequencies
from ..recipe import Recipe
from ..runtime.families import Family, attention_shape, find_family
from .candidates import Candidates, Frequencies, candidates_of, wanted_moments


@dataclass(frozen=True)
class ModelOutline:
    """A model without its weights: all that is known from config and headers.

    config: the transformers config.
    """

    config: Any
    family: Family
    shape: AttentionShape
    sizes: WeightSizes

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelOutline:
        """Raises UnsupportedModelError if rotor cannot compress it."""
        shapes = {name: checkpoint.shape_of(name) for name in checkpoint.names}
        return cls.of_headers(checkpoint.config, shapes, checkpoint.total_bytes())

    @classmethod
    def of_headers(cls, config: Any, shapes: dict[str, list[int]], stored_bytes: int) -> ModelOutline:
        """Build it from the shapes of all tensors by name, and the bytes of their files; raises likewise."""
        family, shape = find_family(config), attention_shape(config)
        sizes = weight_sizes(shapes, stored_bytes, family, shape, int(config.vocab_size))
        return cls(config, family, shape, sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored weights."""
        return self.config.dtype or torch.float32

    def candidates(self, recipe: Recipe) -> Candidates:
        """What each layer may be compressed to; see `candidates_of`."""
        return candidates_of(recipe, self.shape, self.frequencies)

    @property
    def frequencies(self) -> Frequencies | None:
        """Those of RoPE, or None where they depend on the length of a sequence."""
        found = {rotary_frequencies(self.config, layer) for layer in range(self.shape.num_layers)}
        return None if None in found else sorted(of_kind for of_kind in found if of_kind)

    def calibration(self, recipe: Recipe, device: torch.device, dtype: torch.dtype, batch_tokens: int) -> Estimates:
        """Estimate calibrating."""
        candidates, row = self.candidates(recipe), longest_row(recipe.tokens.seq_len, self.config)
        moments = wanted_moments(recipe, candidates)
        return calibration_estimates(self._forward(device, dtype), recipe, candidates, moments, batch_tokens, row)

    def evaluation(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Estimates:
        """Estimate measuring accuracy."""
        return evaluation_estimates(self._forward(device, dtype), recipe, self.candidates(recipe))

    def _forward(self, device: torch.device, dtype: torch.dtype) -> ForwardPass:
        width, vocab_size = feed_forward_width(self.config), int(self.config.vocab_size)
        return ForwardPass(self.sizes, self.shape, width, vocab_size, dtype.itemsize, device.type == "cuda")


def needs_whole_model(recipe: Recipe, device_map: str | None = None) -> WholeModel | None:
    """What of a calibration needs all weights in memory, if anything does."""
    if "gradients" in recipe.rank_needs:
        request = f"ranks.method {recipe.ranks.method} (gradients)"
        return WholeModel(request, "Choose another method, e.g. --set ranks.method=global.")
    return None if device_map is None else WholeModel(f"--device-map {device_map}", "Leave it out.")
