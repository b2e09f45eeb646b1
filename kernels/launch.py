"""Needs of every launch: the GPU of its tensors as the current one, and tables on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rotor.errors import UsageError

from .passes import capturing


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *rest: object, **constants: Any) -> None:
    """Launch `kernel[grid](first, *rest, **constants)` on the device of its first argument.

    Triton launches on the current device, which in a model split over several GPUs is not always that of the layer.
    """
    with device_guard(first.device):
        kernel[grid](first, *rest, **constants)


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one; does nothing on a CPU, where Triton's interpreter runs kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_table(rows: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """A table on a device; whoever asks keeps it.

    Raises:
        UsageError: a CUDA graph is being captured, which would copy the table, and own its memory.
    """
    if capturing(device):
        raise UsageError(
            "a compressed layer runs for the first time while a CUDA graph is captured.",
            "Run the model once before; capturing needs that anyway, to compile kernels.",
        )
    return torch.tensor(rows, dtype=dtype).to(device)


@lru_cache(maxsize=16)
def capability_of(device: torch.device) -> int:
    """Compute capability, 90 is 9.0; where there is no GPU (in Triton's interpreter), as of an H100."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors; two where there is no GPU (in Triton's interpreter)."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def precision(dtype: torch.dtype) -> str:
    """Precision of matrix products: float32 is not rounded to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded(width: int) -> int:
    """The next power of two that matrix products take."""
    return max(16, 1 << (width - 1).bit_length())
