"""Devices by name: the rates from which decode time is predicted. Bundled ones are in devices.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from ..errors import RecipeError
from ..typed import Reader, nearest_name, read_text, read_yaml, shorten

RATES = (
    "bandwidth_bytes_per_s",
    "matmul_flops_per_s",
    "memory_bytes",
    "l2_bytes_per_s",
    "vector_flops_per_s",
    "link_bytes_per_s",
)
COUNTS = ("sms",)

L2_RATIO, VECTOR_RATIO = 2.0, 1 / 16
"""What a device whose file does not say reads from its L2 cache, against its memory, and what it computes outside of
matrix products, against them: the least of the bundled server GPUs, rounded."""


@dataclass(frozen=True)
class Device:
    """Rates of one device.

    bandwidth_bytes_per_s: reading of device memory.
    matmul_flops_per_s: dense bfloat16 matrix products; a multiply-add counts two.
    memory_bytes: device memory.
    source: `data-sheet` (peak rates, which no kernel reaches) or `measured`.
    l2_bytes_per_s: reading of the L2 cache. vector_flops_per_s: float32 outside of matrix products. None: not known,
        and then taken by L2_RATIO and VECTOR_RATIO.
    sms: streaming multiprocessors; None: not known, and then what waits for memory is not predicted.
    link_bytes_per_s: what it sends to its neighbours in one machine (NVLink, Infinity Fabric, PCIe), in one direction;
        None: not known, and times of traffic are not predicted for it.
    """

    bandwidth_bytes_per_s: float
    matmul_flops_per_s: float
    memory_bytes: float
    source: Literal["data-sheet", "measured"]
    l2_bytes_per_s: float | None = None
    vector_flops_per_s: float | None = None
    link_bytes_per_s: float | None = None
    sms: int | None = None

    @property
    def l2_rate(self) -> float:
        """Bytes a second from the L2 cache."""
        return self.l2_bytes_per_s or L2_RATIO * self.bandwidth_bytes_per_s

    @property
    def vector_rate(self) -> float:
        """FLOPs a second outside of matrix products."""
        return self.vector_flops_per_s or VECTOR_RATIO * self.matmul_flops_per_s


def bundled_devices() -> dict[str, Device]:
    """The devices that come with rotor, by name."""
    return parse_devices((resources.files("rotor.prediction") / "devices.yaml").read_text("utf-8"), "devices.yaml")


def find_device(name: str, device_file: str | None = None) -> Device:
    """A device of `device_file`, or else a bundled one.

    Raises:
        RecipeError: no device of that name (names the nearest, and all), or the file is not valid.
    """
    devices = bundled_devices()
    if device_file is not None:
        devices |= parse_devices(read_text(Path(device_file), f"device file {device_file}"), device_file)
    if name not in devices:
        raise RecipeError(
            f"device {name!r} is not known{nearest_name(name, devices)}",
            f"Known devices: {', '.join(devices)}; or give the rates of another one in a device file.",
        )
    return devices[name]


def parse_devices(text: str, where: str) -> dict[str, Device]:
    """Read a YAML mapping from device names to the fields of Device; `where` names it in errors.

    Raises:
        RecipeError: not valid YAML, an unknown key (names the nearest), a missing key, a value of the wrong type, or a
            rate that is not positive and finite.
    """
    where = f"device file {where}"
    data = read_yaml(text, where)
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where}: expected a mapping from device names to their rates, got {shorten(data)}.")
    devices = {}
    for key, fields in data.items():
        name = key if isinstance(key, str) else shorten(key)
        device: Device = Reader(where).read(Device, fields, name)
        for rate in (*RATES, *COUNTS):
            value = getattr(device, rate)
            if value is not None and value <= 0:
                raise RecipeError(f"{where}: {name}.{rate}: got {value}, expected a positive number.")
        devices[name] = device
    return devices
