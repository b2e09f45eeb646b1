"""Measure available memory, and decide whether a model's weights stay in it or are read layer by layer."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import UsageError

HOST_SHARE, DEVICE_SHARE = 0.8, 0.9
"""Shares of free memory that `auto` fills: estimates are not exact, and other programs need some."""

LOGIT_BYTES = {"cpu": 1 << 24, "cuda": 1 << 29}
"""Memory that the float32 logits of one evaluation batch may take; a CPU is twice as fast when they fit its caches."""

HEAD_POSITIONS = 128
"""Fewest positions that go through the head together, to make reading its weights worth it."""

EVALUATION_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens that go through a layer together when accuracy is measured."""

LOGIT_COPIES = 6
"""Tensors of the size of a batch's logits that scoring has at once (logits, float copy, log-softmax, reference)."""

LIBRARIES_BYTES = 600 << 20
"""Resident memory of Python with torch and transformers imported and used (measured: 0.45 to 0.6 GB)."""

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes of a command, by purpose.

    host: main memory of each process.
    device: memory of the GPU, empty on a CPU.
    disk_bytes: size of the output folder while it is written, of which kept_disk_bytes stay.
    """

    host: dict[str, int]
    device: dict[str, int]
    disk_bytes: int = 0
    kept_disk_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


class Estimates(NamedTuple):
    """Estimates of a command with all weights in memory (resident), and with one part of them at a time (streamed)."""

    resident: Estimate
    streamed: Estimate


def available_host_bytes() -> int:
    """Memory that this process may still take, bounded by the machine, its control groups and its resource limits."""
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    bounds += [kilobytes << 10 for kilobytes in _numbers(Path("/proc/meminfo"), "MemAvailable:")]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft = resource.getrlimit(limit)[0]
        bounds += [] if soft == resource.RLIM_INFINITY else [max(0, soft - resident)]
    for line in _lines(Path("/proc/self/cgroup")):
        group = CGROUPS / line.removeprefix("0::").strip().lstrip("/")
        for folder in (group, *group.parents) if line.startswith("0::") else ():
            limits = [int(text) for text in _lines(folder / "memory.max") if text.isdigit()]
            # Page cache counts as free, because the system drops it when memory is short.
            bounds += [max(0, limit - sum(_numbers(folder / "memory.stat", "anon "))) for limit in limits]
    return min(bounds)


def _numbers(path: Path, name: str) -> list[int]:
    """The second word, a number, of each line of a file that begins with `name`."""
    return [int(line.split()[1]) for line in _lines(path) if line.startswith(name)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []


def usable_host_bytes() -> int:
    """Available memory that `auto` may fill."""
    return int(HOST_SHARE * available_host_bytes())


def available_device_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def stream_weights(
    offload: str, estimates: Estimates, device: torch.device, whole: tuple[str, str] | None = None
) -> tuple[bool, str]:
    """Decide whether to read weights layer by layer; also returns a line that compares the estimate with free memory.

    Args:
        whole: the option that needs the whole model in memory, if there is one, and a hint what to ask for instead.
    Raises:
        UsageError: the whole model is needed, but does not fit or --offload always was given.
    """
    host, gpu = available_host_bytes(), available_device_bytes(device)
    there = f"{host / 1e9:.1f} GB available, of which at most {HOST_SHARE:.0%} are filled"
    if gpu is not None:
        there += f", and {gpu / 1e9:.1f} GB on the GPU ({DEVICE_SHARE:.0%})"

    def fits(estimate: Estimate) -> bool:
        on_device = gpu is None or estimate.device_bytes <= DEVICE_SHARE * gpu
        return estimate.host_bytes <= int(HOST_SHARE * host) and on_device

    stream = offload == "always" or (offload == "auto" and not fits(estimates.resident))
    if stream and whole is not None:
        why = "--offload always was given" if offload == "always" else f"it takes {_needs(estimates.resident)}"
        raise UsageError(
            f"{whole[0]} needs the whole model in memory, but {why} ({there}).",
            f"{whole[1]} Or give --offload never to try all the same.",
        )
    chosen = estimates[stream]
    kind = "one layer of weights at a time" if stream else "all weights in memory"
    sizes = {**chosen.host, **chosen.device}.items()
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sizes if size >= 5e7)
    line = f"memory: about {_needs(chosen)}, {kind} ({parts}); {there}"
    if not fits(chosen):
        line += "; this may not be enough: lower --batch-tokens, or use a machine with more"
    return stream, line


def _needs(estimate: Estimate) -> str:
    gpu = f" and {estimate.device_bytes / 1e9:.1f} GB of GPU memory" if estimate.device else ""
    return f"{estimate.host_bytes / 1e9:.1f} GB{gpu}"
