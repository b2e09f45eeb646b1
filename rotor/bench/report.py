"""What surrounds the numbers of a benchmark: device, the JSON file, and measured rates for the cost model."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from ..errors import UsageError
from ..format.atomic import write_text
from ..format.json_files import json_text
from ..prediction.devices import parse_devices
from .models import physical_memory


def describe_device(device: torch.device) -> dict[str, Any]:
    """What identifies the device in a record."""
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
    return {
        "type": "cpu",
        "name": _processor(),
        "threads": torch.get_num_threads(),
        "memory_bytes": physical_memory(device),
    }


def _processor() -> str:
    """The name of the CPU where Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def add_device(file: Path, name: str, report: dict[str, Any]) -> None:
    """Write the measured rates of a benchmark as an entry of a device file, which `--device-file` reads.

    Other entries of the file stay; the one of that name is replaced, comments are lost.

    Raises:
        UsageError: the file cannot be read or written. RecipeError: it is no device file.
    """
    try:
        text = file.read_text("utf-8") if file.exists() else "{}"
        devices = {key: asdict(device) for key, device in parse_devices(text, str(file)).items()}
        rates = report["rates"]
        devices[name] = {
            "bandwidth_bytes_per_s": rates["copy_bytes_per_s"],
            "matmul_flops_per_s": rates["bfloat16_flops_per_s"],
            "memory_bytes": float(report["device"]["memory_bytes"]),
            "source": "measured",
            **({"sms": report["device"]["sms"]} if "sms" in report["device"] else {}),
        }
        write_text(file, yaml.safe_dump(devices, sort_keys=False))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--device-file {file}: {error}", "Give a YAML file in a folder that exists.") from error


def device_name(report: dict[str, Any]) -> str:
    """A name for a device file: `nvidia-h200`."""
    return "-".join("".join(c if c.isalnum() else " " for c in report["device"]["name"].lower()).split())


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the result as JSON; raises UsageError if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(report) + "\n")
    except OSError as error:
        raise UsageError(f"{path}: {error}", "Give another file with -o.") from error
