"""Devices by name, with the rates that decode times are predicted from. devices.yaml has the bundled ones."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Literal

from pydantic import Field

from ...checked import Reader, nearest_name
from ...checkpoint.files import read_yaml
from ...errors import RecipeError

INSTRUCTIONS_PER_CYCLE = 1.5
"""Warp instructions that an SM is assumed to issue per cycle (of at most 4) if the device was not measured."""

Rate = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Device:
    """Rates of one device.

    bandwidth_bytes_per_s: rate of reading device memory.
    source: `data-sheet` (peak rates, which no kernel reaches) or `measured`.
    sms, clock_hz: streaming multiprocessors and their clock; if unknown (None), instructions set no limit.
    instructions_per_cycle: warp instructions that an SM issues per cycle in attention.
    matmul_flops_per_s: rate of dense products in bfloat16, by which prompts are predicted; None if unknown.
    """

    bandwidth_bytes_per_s: Rate
    source: Literal["data-sheet", "measured"]
    sms: Annotated[int, Field(gt=0)] | None = None
    clock_hz: Rate | None = None
    instructions_per_cycle: Annotated[float, Field(gt=0, le=4)] = INSTRUCTIONS_PER_CYCLE
    matmul_flops_per_s: Rate | None = None

    def read_seconds(self, size_bytes: float) -> float:
        """Seconds to read this many bytes from its memory."""
        return size_bytes / self.bandwidth_bytes_per_s

    def seconds(self, cycles: float) -> float:
        """Seconds for this many SM cycles, spread over all SMs; 0 if SMs or clock are unknown."""
        return 0.0 if self.sms is None or self.clock_hz is None else cycles / (self.sms * self.clock_hz)

    def issue_seconds(self, warp_instructions: float) -> float:
        """Seconds to issue this many warp instructions on all SMs; 0 if SMs or clock are unknown."""
        return self.seconds(warp_instructions / self.instructions_per_cycle)


def bundled_devices() -> dict[str, Device]:
    """Devices that come with rotor, by name."""
    text = (resources.files("rotor.calibration.prediction") / "devices.yaml").read_text("utf-8")
    devices: dict[str, Device] = Reader("devices.yaml").read(dict[str, Device], read_yaml(text, "devices.yaml"))
    return devices


def find_device(name: str) -> Device:
    """Find a bundled device by its name.

    Raises:
        RecipeError: no device of that name; names the nearest one, and all.
    """
    devices = bundled_devices()
    if name not in devices:
        raise RecipeError(
            f"device {name!r} is not known{nearest_name(name, devices)}",
            f"Known devices: {', '.join(devices)}.",
        )
    return devices[name]
