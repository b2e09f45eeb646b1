"""Layers whose kernels are compiled: those of a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from ...checkpoint.kernel_config import LayerKernels, layout_class
from ...checkpoint.layout import AttentionShape, LayerLayout
from ...models.compressed import CompressedCheckpoint


@dataclass(frozen=True)
class Subject:
    """A layer to be compiled: its name, how many are alike, its kernels' configuration, and the model's sizes."""

    name: str
    layers: int
    layout: LayerLayout
    kernels: LayerKernels
    shape: AttentionShape
    dtype: torch.dtype
    page: int = 0
    softcap: bool = False


def subjects_of(folder: Path) -> list[Subject]:
    """The distinct layers of a compressed checkpoint, by its kernel_config.json.

    Raises:
        CheckpointError: not a compressed checkpoint; no kernel configuration, or nonsense in it.
    """
    checkpoint = CompressedCheckpoint(folder)
    alike = Counter(zip(checkpoint.layouts, checkpoint.kernel_config.layers, strict=True))
    softcap = bool(getattr(checkpoint.config.get_text_config(), "attn_logit_softcapping", None))
    return [
        Subject(layout_class(layout), count, layout, kernels, checkpoint.shape, checkpoint.dtype, 0, softcap)
        for (layout, kernels), count in alike.items()
    ]
