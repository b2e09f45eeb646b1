"""Description of the GPU, and the two rates that nothing on it exceeds: reading memory, and products in bfloat16."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import torch

from rotor.tools.bench.records import describe_device, quartiles

from .plan import Record

ASKED = (
    "driver_version", "clocks.current.sm", "clocks.current.memory", "clocks.max.sm", "clocks.max.memory", "power.limit",
    "power.draw", "temperature.gpu", "pstate",
)  # fmt: skip
"""Queries of nvidia-smi; no setting is changed."""


def describe() -> Iterator[Record]:
    """The device, or that there is none."""
    if not torch.cuda.is_available():
        yield {"cuda": False, "why": "there is no CUDA device here"}
        return
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    more = {"l2_bytes": properties.L2_cache_size, "cudnn": torch.backends.cudnn.version()}
    yield {"cuda": True, "gpu": {**describe_device(device), **more, **smi()}}


def smi() -> dict[str, str]:
    """Clocks and power as nvidia-smi says them."""
    if shutil.which("nvidia-smi") is None:
        return {}
    call = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=30)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(ASKED, values, strict=True)) if done.returncode == 0 and len(values) == len(ASKED) else {}


def rates(device: str = "cuda", size_bytes: int = 4 << 30, side: int = 8192, repetitions: int = 10) -> Iterator[Record]:
    """Bytes a second of a copy (read and written) and of a sum (read), and bfloat16 products a second."""
    where = torch.device(device)
    left, right = (torch.randn(size_bytes // 4, device=where) for _ in range(2))
    seconds = _seconds(lambda: left.copy_(right), where, repetitions)
    yield {"row": "copy", "seconds": seconds, "bytes_per_s": 2 * size_bytes / seconds["median"]}
    seconds = _seconds(lambda: left.sum(), where, repetitions)
    yield {"row": "sum", "seconds": seconds, "bytes_per_s": size_bytes / seconds["median"]}
    left, right = (torch.randn(side, side, device=where).bfloat16() for _ in range(2))
    seconds = _seconds(lambda: left @ right, where, repetitions)
    yield {"row": "bfloat16 product", "seconds": seconds, "flop_per_s": 2 * side**3 / seconds["median"]}
    if where.type == "cuda":
        yield {"row": "clocks after load", "gpu": smi()}


def _seconds(call: Callable[[], object], device: torch.device, repetitions: int) -> dict[str, float]:
    found = []
    for repetition in range(repetitions + 2):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repetition >= 2:
            found.append(time.perf_counter() - start)
    return quartiles(found)
