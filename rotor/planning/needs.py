"""What a command takes: memory, disk, and time."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ..calibration.outline import ModelOutline
from ..models.hardware import matmul_rate
from ..models.memory import Estimate, available_host_bytes, usable_host_bytes
from ..recipe import Recipe


@dataclass(frozen=True)
class Needs:
    """Memory and disk of a command in bytes, memory by what it is for, and seconds of its matrix products alone.

    streamed: one layer of weights in memory at a time. usable_host_bytes: of what is available, where weights are to
    stay in memory. disk_bytes: in the output folder while it is written; kept_disk_bytes: of it, what stays.
    """

    streamed: bool
    host_bytes: dict[str, int]
    device_bytes: dict[str, int]
    disk_bytes: int
    kept_disk_bytes: int
    product_seconds: dict[str, float]
    available_host_bytes: int
    usable_host_bytes: int
    free_disk_bytes: int

    @classmethod
    def of(
        cls, estimate: Estimate, streamed: bool, out: Path, disk: int, kept: int, seconds: dict[str, float]
    ) -> Needs:
        place = next(folder for folder in (out, *out.parents) if folder.exists())
        memory, free = (available_host_bytes(), usable_host_bytes()), shutil.disk_usage(place).free
        return cls(streamed, estimate.host, estimate.device, disk, kept, seconds, *memory, free)

    @classmethod
    def of_calibration(
        cls,
        outline: ModelOutline,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype,
        estimate: Estimate,
        streamed: bool,
        out: Path,
    ) -> Needs:
        rate, rate64 = matmul_rate(device, dtype), matmul_rate(torch.device("cpu"), torch.float64)
        seconds = {
            name: round(count / (rate64 if name == "statistics" else rate), 1)
            for name, count in outline.calibration_flops(recipe).items()
        }
        return cls.of(estimate, streamed, out, estimate.disk_bytes, estimate.kept_disk_bytes, seconds)
