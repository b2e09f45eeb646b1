"""Measure the memory that there is, and decide whether a model's weights stay in it or are read layer by layer."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import UsageError
from .estimate import Estimate, Estimates

HOST_SHARE, DEVICE_SHARE = 0.8, 0.9
"""Shares of the free memory that `auto` fills: estimates are not exact, and other programs need some."""

CGROUPS = (
    ("", "/sys/fs/cgroup", "memory.max", "anon "),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss "),
)
"""Controller in /proc/self/cgroup, mount point, file of the limit, and line of memory.stat with what cannot be dropped;
for versions 2 and 1."""


class WholeModel(NamedTuple):
    """A request that needs all weights in memory, and what to ask for instead."""

    request: str
    instead: str


def available_host_bytes() -> int:
    """Memory that this process may still take: of the machine, its control groups and its limits."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    found += [int(line.split()[1]) << 10 for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        for controller, mount, limit_file, used in CGROUPS:
            if controller in controllers.split(","):
                found += _cgroup_rooms(Path(mount), path, limit_file, used)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft = resource.getrlimit(limit)[0]
        found += [] if soft == resource.RLIM_INFINITY else [max(0, soft - own)]
    return min(found)


def _cgroup_rooms(mount: Path, path: str, limit_file: str, used: str) -> list[int]:
    """What each group from this one up leaves; page cache counts as free, because the system drops it."""
    rooms = []
    folder = mount / path.strip().lstrip("/")
    while folder == mount or mount in folder.parents:
        limit = next(iter(_lines(folder / limit_file)), "max").strip()
        if limit.isdigit():
            taken = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(used)]
            rooms.append(max(0, int(limit) - sum(taken)))
        folder = folder.parent
    return rooms


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []


def usable_host_bytes() -> int:
    """What `auto` fills of it."""
    return int(HOST_SHARE * available_host_bytes())


def available_device_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def fits(estimate: Estimate, device: torch.device, processes: int = 1) -> bool:
    """Whether an estimate, of each of some processes, leaves some of what there is for others."""
    free = available_device_bytes(device)
    on_device = free is None or estimate.device_bytes <= DEVICE_SHARE * free
    return processes * estimate.host_bytes <= usable_host_bytes() and on_device


def stream_weights(
    offload: str, estimates: Estimates, device: torch.device, whole: WholeModel | None = None, processes: int = 1
) -> tuple[bool, str]:
    """Whether to read weights layer by layer, and one line with the estimate against what there is.

    Args:
        whole: what was asked for that needs the whole model in memory, if anything does.
        processes: that each hold their own weights.
    Raises:
        UsageError: the whole model is needed, and does not fit or is not to be in memory.
    """
    there = _there(device)
    stream = offload == "always" or (offload == "auto" and not fits(estimates.resident, device, processes))
    if stream and whole is not None:
        why = "--offload always was given" if offload == "always" else f"it takes {_needs(estimates[0], processes)}"
        raise UsageError(
            f"{whole.request} needs the whole model in memory, but {why} ({there}).",
            f"{whole.instead} Or give --offload never to try all the same.",
        )
    chosen = estimates[stream]
    kind = "one layer of weights at a time" if stream else "all weights in memory"
    line = f"memory: about {_needs(chosen, processes)}, {kind} ({_parts(chosen)}); {there}"
    if not fits(chosen, device, processes):
        line += "; this may not be enough: lower --batch-tokens, or use a machine with more"
    return stream, line


def _needs(estimate: Estimate, processes: int) -> str:
    times = f" in each of {processes} processes" if processes > 1 else ""
    gpu = f" and {estimate.device_bytes / 1e9:.1f} GB of GPU memory" if estimate.device else ""
    return f"{estimate.host_bytes / 1e9:.1f} GB{gpu}{times}"


def _parts(estimate: Estimate) -> str:
    parts = {**estimate.host, **estimate.device}
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size >= 5e7)


def _there(device: torch.device) -> str:
    """What is available, and how much of it rotor fills."""
    gpu = available_device_bytes(device)
    said = f"{available_host_bytes() / 1e9:.1f} GB available, of which at most {HOST_SHARE:.0%} are filled"
    return said if gpu is None else f"{said}, and {gpu / 1e9:.1f} GB on the GPU ({DEVICE_SHARE:.0%})"
