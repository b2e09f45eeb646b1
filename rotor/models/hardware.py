"""Choose the device and dtype of a forward pass by what the user named."""

from __future__ import annotations

import torch

from ..errors import UsageError
from ..recipe.settings import Compute


def pick_device(name: str) -> torch.device:
    """Choose a device: `auto` is the GPU if there is one; raises UsageError for a device that is not there."""
    Compute(device=name).check()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: no CUDA device is available.", "Give --device cpu.")
    return device


def pick_dtype(name: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Choose a dtype: `auto` is float32 on a CPU and the checkpoint's dtype elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint_dtype
    Compute(dtype=name).check()
    found: torch.dtype = getattr(torch, name)
    return found
