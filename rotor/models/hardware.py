"""Choose the device and dtype of a forward pass by what the user named; and time a matrix product there."""

from __future__ import annotations

import os

import torch
from torch.utils.benchmark import Timer

from ..errors import UsageError
from ..options import DeviceOptions

RATE_SIZE, RATE_SECONDS = 512, 0.2
"""Size of the matrices whose product is timed, and for how long."""

BYTES_PER_THREAD, DEFAULT_THREADS = 1 << 25, torch.get_num_threads()
"""Weights that are worth a thread on a CPU: of smaller models threads wait for each other longer than they work."""


def fit_threads(weight_bytes: int) -> None:
    """Let torch use as many threads as a model of that size keeps busy, unless OMP_NUM_THREADS says how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(DEFAULT_THREADS, weight_bytes // BYTES_PER_THREAD)))


def pick_device(name: str) -> torch.device:
    """Choose a device: `auto` is the GPU if there is one; raises UsageError for a device that is not there."""
    DeviceOptions(device=name)
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
    DeviceOptions(dtype=name)
    found: torch.dtype = getattr(torch, name)
    return found


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matrix product, measured for RATE_SECONDS."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(RATE_SIZE, RATE_SIZE, generator=generator).to(device, dtype)
    found = Timer("left @ left", globals={"left": left}, num_threads=torch.get_num_threads()).blocked_autorange(
        min_run_time=RATE_SECONDS
    )
    return 2 * RATE_SIZE**3 / found.mean
