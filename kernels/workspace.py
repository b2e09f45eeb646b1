"""Memory for what one launch leaves to the next, kept from layer to layer and from step to step.

Kernels of a stream run one after another: what a layer's launches have read, the next layer's may overwrite. So there
is one workspace for each thread, device and stream, and it grows to the most that a layer has asked for.

Decoding, few queries whose keys are split, and vLLM's backend take their partial results and log-sum-exps from it. Two
callers do without, and allocate: a CUDA graph under capture, whose own pool keeps memory at its addresses for as
long as the graph lives, and the operators of a traced model, whose compiler may own the pool that is allocated from.
"""

from __future__ import annotations

import math
from threading import local

import torch
from torch import Tensor

ALIGNED = 64
"""Float32 numbers: parts begin at multiples of 256 bytes, as memory that PyTorch allocates does."""

MOST_SHAPES = 256
"""Sets of shapes whose views are remembered: a layer's widths times the batch sizes that come."""


class Workspace:
    """Float32 memory of a device, handed out anew at each `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._views: dict[tuple[tuple[int, ...], ...], tuple[Tensor, ...]] = {}

    def take(self, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Tensors of these shapes, float32, with anything in them; what `take` gave before may be overwritten."""
        views = self._views.get(shapes)
        if views is None:
            if len(self._views) == MOST_SHAPES:
                self._views.clear()
            views = self._views[shapes] = self._parts(shapes)
        return views

    def _parts(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
        sizes = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes]
        with torch.inference_mode(False):  # it serves calls in and out of that mode
            if self._memory is None or self._memory.numel() < sum(sizes):
                self._views.clear()
                self._memory = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
            parts = self._memory[: sum(sizes)].split(sizes)
            return tuple(part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True))


class _OfThread(local):
    """The workspaces of a thread: others may launch on the same stream between two launches of its own."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], Workspace] = {}


_own = _OfThread()


def workspace_on(device: torch.device) -> Workspace | None:
    """That of the current thread and stream; None where a CUDA graph is being captured."""
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(device).cuda_stream
    workspace = _own.by_stream.get((device, stream))
    if workspace is None:
        workspace = _own.by_stream[device, stream] = Workspace(device)
    return workspace
