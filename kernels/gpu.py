"""What a GPU gives a program of a kernel: registers, shared memory, matrix products. It need not be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

SHARED_KB = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Shared memory that one program may have, by compute capability. Source: CUDA programming guide."""


@dataclass(frozen=True)
class Gpu:
    """What tiles depend on: the compute capability (90 is 9.0), and bytes of shared memory that a program may have."""

    capability: int
    shared_bytes: int

    @classmethod
    def of_capability(cls, capability: int, unknown_bytes: int = 64 << 10) -> Gpu:
        """A GPU that need not be there; unknown_bytes where nothing is known of its shared memory."""
        return cls(capability, SHARED_KB[capability] << 10 if capability in SHARED_KB else unknown_bytes)

    @property
    def registers_hold_operands(self) -> bool:
        """Whether matrix products read all of their operands from registers, not from shared or tensor memory."""
        return not 90 <= self.capability < 120


HOPPER = Gpu.of_capability(90)


@lru_cache(maxsize=16)
def gpu_of(device: torch.device) -> Gpu:
    """Of a device; where there is no GPU (in Triton's interpreter), as for an H100."""
    if device.type != "cuda":
        return HOPPER
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 64 << 10)  # ROCm does not say; it has 64 KB
    return Gpu.of_capability(10 * properties.major + properties.minor, shared_bytes)


@lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors; two where there is no GPU (in Triton's interpreter)."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def precision(element_bytes: int) -> str:
    """Of matrix products: float32 is multiplied as such."""
    return "ieee" if element_bytes == 4 else "tf32"


def shrink_to_fit(config: dict[str, Any], shared_bytes: Callable[[], int], gpu: Gpu, *order: tuple[str, int]) -> None:
    """Halve, in `order`, constants of a kernel that are above their least until its program fits the shared memory.

    Args:
        config: changed in place.
        shared_bytes: what a program with `config` as it is needs.
        order: names of constants, each with its least. Where all are at their least the program may still not fit.
    """
    for name, least in order:
        while shared_bytes() > gpu.shared_bytes and config[name] > least:
            config[name] = max(least, config[name] // 2)
