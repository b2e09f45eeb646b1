"""Time of calls replayed from a CUDA graph, which leaves out what the host does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .clock import Seconds

WARM_UPS = 2


def replayed(calls: Sequence[Callable[[], Any]], device: torch.device, repetitions: int) -> Seconds:
    """Seconds of one of `calls`, on the average over a graph that holds all of them, one after another.

    Calls over caches that are together larger than the L2 cache find it cold, as the layers of a model do. Where there
    is no GPU the calls are made in turn, as they would be captured.
    """
    if device.type != "cuda":
        return Seconds.of([_in_turn(calls) for _ in range(repetitions)])
    captured = capture(calls)
    for _ in range(WARM_UPS):
        captured.replay()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return Seconds.of(times)


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, after each was made on a stream beside, which compiles and allocates what is kept."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _in_turn(calls: Sequence[Callable[[], Any]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)
