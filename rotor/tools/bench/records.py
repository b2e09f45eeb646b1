"""Surroundings of a measurement: date, command, versions, commit, device."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles

import torch

from ...checked import JsonObject
from ...versions import versions

COMMIT = "ROTOR_COMMIT"
"""Environment variable with the commit of a copy, which git does not know or knows as changed."""


def provenance(command: str) -> JsonObject:
    """Describe what made a measurement; `command` is what the user gave."""
    more = {}
    if find_spec("triton") is not None:
        import triton

        more["triton"] = triton.__version__
    root = Path(__file__).resolve().parents[3]
    commit = os.environ.get(COMMIT) or None
    if not commit and (root / ".git").exists():
        call = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        commit = subprocess.run(call, capture_output=True, text=True).stdout.strip() or None
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": command,
        "versions": {**versions(), "python": platform.python_version(), **more},
        "commit": commit,
    }


def describe_device(device: torch.device) -> JsonObject:
    """Describe the device in a record."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "type": "cpu",
        "name": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "low": low, "high": high}
