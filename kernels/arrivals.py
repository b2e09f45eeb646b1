# mypy: disable-error-code="no-untyped-def"
"""Let the last of some programs of a launch go on with what all of them stored.

Counters are zero before a launch and after it. A thread keeps some for each stream. What goes into a CUDA graph takes
others each time, as graphs may run beside what was launched later.
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.errors import UsageError

from .passes import capturing

OF_GRAPHS = 1 << 20
"""Counters of a device for CUDA graphs; a graph takes a few for each layer. Then they are taken anew."""


@triton.jit
def last_of(counter, programs):
    """Tell whether this is the last of some programs to come here; it sees what all of them stored before."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    last = before == programs - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


class _Counters(threading.local):
    """Counters that a thread keeps, by device and stream."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], Tensor] = {}


_counters = _Counters()
_of_graphs: dict[torch.device, Tensor] = {}
_taken: dict[torch.device, int] = {}
_lock = threading.Lock()


def prepare_counters(device: torch.device) -> Tensor:
    """Make the counters that graphs take, before a graph is captured.

    Raises:
        UsageError: a graph is being captured.
    """
    with _lock:
        if device not in _of_graphs:
            if capturing(device):
                raise UsageError(
                    "a compressed layer runs for the first time while a CUDA graph is captured.",
                    "Run the model once before; capturing needs that anyway, to compile kernels.",
                )
            with torch.inference_mode(False):
                _of_graphs[device] = torch.zeros(OF_GRAPHS, dtype=torch.int32, device=device)
            _taken[device] = 0
        return _of_graphs[device]


def counters(count: int, device: torch.device) -> Tensor:
    """Counters for a launch, all zero, [at least count] int32."""
    pool = prepare_counters(device)
    if capturing(device):
        with _lock:
            first = _taken[device] if _taken[device] + count <= len(pool) else 0
            _taken[device] = first + count
        return pool[first : first + count]
    place = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    kept = _counters.by_stream.get(place)
    if kept is None or len(kept) < count:
        with torch.inference_mode(False):
            kept = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        _counters.by_stream[place] = kept
    return kept
