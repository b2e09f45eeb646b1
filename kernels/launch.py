"""Needs of every launch: the GPU of its tensors as the current one, and tables on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

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


class AbsentGPU(NamedTuple):
    """The GPU that launches are made for on a CPU, where Triton's interpreter runs them, or they are only compiled."""

    capability: int = 90
    sms: int = 2


_absent = AbsentGPU()


@contextmanager
def absent(gpu: AbsentGPU) -> Iterator[None]:
    """Make launches on a CPU for another GPU."""
    global _absent
    before, _absent = _absent, gpu
    try:
        yield
    finally:
        _absent = before


@lru_cache(maxsize=16)
def _present(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count


def capability_of(device: torch.device) -> int:
    """Compute capability, 90 is 9.0; on a CPU that of `absent`."""
    return _present(device)[0] if device.type == "cuda" else _absent.capability


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors; on a CPU those of `absent`."""
    return _present(device)[1] if device.type == "cuda" else _absent.sms


SHARED_BYTES = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 101: 227 << 10, 103: 227 << 10}
"""Most bytes of shared memory of a program by compute capability; of others LEAST_SHARED_BYTES. Source: CUDA C++
Programming Guide, compute capabilities, maximum amount of shared memory per thread block."""

LEAST_SHARED_BYTES = 99 << 10


def shared_bytes(capability: int) -> int:
    """Most bytes of shared memory of a program on GPUs of a compute capability."""
    return SHARED_BYTES.get(capability, LEAST_SHARED_BYTES)


def precision(dtype: torch.dtype) -> str:
    """Precision of matrix products: float32 is not rounded to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def padded(width: int) -> int:
    """The next power of two that matrix products take."""
    return max(16, 1 << (width - 1).bit_length())


class _Buffers(threading.local):
    """Memory that a thread keeps between its launches, by its use, device and stream, as other threads launch in
    between."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[str, torch.device, int], Tensor] = {}


_buffers = _Buffers()


def kept_memory(use: str, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Float32 buffers that a launch leaves to another, kept from layer to layer and from step to step.

    Each begins at a multiple of 256 bytes. A CUDA graph under capture takes them from its own pool.
    """
    whole = [-(-size // 64) * 64 for size in sizes]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    memory, place, kept = None, (use, device, stream), not capturing(device)
    if kept:
        memory = _buffers.by_stream.get(place)
    if memory is None or memory.numel() < sum(whole):
        with torch.inference_mode(False):  # it serves calls in and out of that mode
            memory = torch.empty(sum(whole), dtype=torch.float32, device=device)
        if kept:
            _buffers.by_stream[place] = memory
    return [part[:size] for part, size in zip(memory[: sum(whole)].split(whole), sizes, strict=True)]
