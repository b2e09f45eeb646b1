"""Devices by name: the rates from which decode time is predicted. Bundled ones are in devices.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..checked import Reader, nearest_name
from ..errors import RecipeError
from ..format.yaml_files import read_text, read_yaml

INSTRUCTIONS_PER_CYCLE = 1.5
"""What kernels of this kind are taken to issue of the 4 that an SM can, where nobody has measured it."""

Rate = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Device:
    """Rates of one device.

    bandwidth_bytes_per_s: reading of device memory.
    source: `data-sheet` (peak rates, which no kernel reaches) or `measured`.
    sms, clock_hz: streaming multiprocessors and their clock; None: not known, and what they issue is no limit then.
    instructions_per_cycle: warp instructions that an SM issues in a cycle of attention.
    """

    bandwidth_bytes_per_s: Rate
    source: Literal["data-sheet", "measured"]
    sms: Annotated[int, Field(gt=0)] | None = None
    clock_hz: Rate | None = None
    instructions_per_cycle: Annotated[float, Field(gt=0, le=4)] = INSTRUCTIONS_PER_CYCLE

    def read_seconds(self, size_bytes: float) -> float:
        """Of reading so many bytes from its memory."""
        return size_bytes / self.bandwidth_bytes_per_s

    def issue_seconds(self, warp_instructions: float) -> float:
        """Of issuing so many instructions on all of its SMs; 0 where these are not known."""
        if self.sms is None or self.clock_hz is None:
            return 0.0
        return warp_instructions / (self.sms * self.clock_hz * self.instructions_per_cycle)


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
    devices: dict[str, Device] = Reader(where).read(dict[str, Device], read_yaml(text, where))
    return devices
