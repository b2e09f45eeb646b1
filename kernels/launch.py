"""How every kernel is launched: on the GPU that its tensors are on.

Triton launches on the current device, which in a model spread over several GPUs is not always that of the layer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *rest: Any, **constants: Any) -> None:
    """Launch `kernel[grid](first, *rest, **constants)` on the device of its first argument."""
    with device_guard(first.device):
        kernel[grid](first, *rest, **constants)


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, and does nothing on a CPU, where Triton's interpreter runs kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
