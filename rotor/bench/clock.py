"""Time on a device: interleaved repetitions with a cold L2 cache, and the rates that floors are computed from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

FLUSH_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Read before each timed call, several times any cache: what is written would have to leave the cache while the call is
timed. On a GPU it also takes longer than the host needs to queue the call's launches, so that these are not what is
measured."""

COPY_BYTES = {"cuda": 1 << 32, "cpu": 1 << 27}
MATRIX = {"cuda": 8192, "cpu": 768}
"""Bytes of the measured copy's source, and rows of the measured square matrix product."""


@dataclass(frozen=True)
class Seconds:
    """Of one call: median and quartiles over the repetitions."""

    median: float
    low: float
    high: float
    repetitions: int

    @classmethod
    def of(cls, times: list[float]) -> Seconds:
        low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        return cls(median(times), low, high, len(times))


class Clock:
    """Times calls on a device, each after a flush of its caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush_bytes = FLUSH_BYTES[device.type]
        self._buffer: torch.Tensor | None = None

    def once(self, call: Callable[[], Any]) -> float:
        """Seconds of one call; the host's launches are left out on a GPU where the device is busy longer than they."""
        self._flush()
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def interleaved(self, calls: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, Seconds]:
        """Every call once, then every call again, so that drifts of the clock rate meet all alike; one warm-up."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(repetitions):
            for name, call in calls.items():
                times[name].append(self.once(call))
        return {name: Seconds.of(values) for name, values in times.items()}

    def release(self) -> None:
        """Give the flush buffer back, before memory is measured."""
        self._buffer = None

    def _flush(self) -> None:
        if self._buffer is None:
            # Written once: pages that never were would all be one.
            self._buffer = torch.ones(self.flush_bytes // 4, dtype=torch.float32, device=self.device)
        self._buffer.sum()


@dataclass(frozen=True)
class Rates:
    """What the device reached in this run.

    copy_bytes_per_s: of a large copy, bytes read and written. matmul_flops_per_s: of a large square matrix product in
    the dtype of the benchmark, and bfloat16_flops_per_s in bfloat16; a multiply-add counts two.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    bfloat16_flops_per_s: float


def measure_rates(clock: Clock, dtype: torch.dtype, repetitions: int) -> Rates:
    """Copy bandwidth and matrix rates of the clock's device, by medians."""
    device = clock.device
    source = torch.zeros(COPY_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = clock.interleaved({"copy": partial(target.copy_, source)}, repetitions)["copy"]
    size = 2 * source.nbytes
    rates = {kind: _matmul_rate(clock, kind, repetitions) for kind in {dtype, torch.bfloat16}}
    return Rates(size / copied.median, rates[dtype], rates[torch.bfloat16])


def _matmul_rate(clock: Clock, dtype: torch.dtype, repetitions: int) -> float:
    rows = MATRIX[clock.device.type]
    # Not zeros or ones: a GPU clocks higher where few bits flip.
    generator = torch.Generator(clock.device).manual_seed(0)
    left, right = (torch.randn(rows, rows, generator=generator, device=clock.device).to(dtype) for _ in range(2))
    seconds = clock.interleaved({"matmul": lambda: left @ right}, repetitions)["matmul"]
    return 2 * rows**3 / seconds.median
