"""The first phase: what the device is, and the rates that it reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from ..clock import Clock, measure_rates
from ..report import describe_device
from .case import Case

REPETITIONS = 10


def measured_device(dry: bool) -> torch.device:
    return torch.device("cpu" if dry else "cuda")


def device_cases(dry: bool) -> Iterator[Case]:
    yield Case("rates", partial(_rates, dry))


def _rates(dry: bool) -> dict[str, Any]:
    device = measured_device(dry)
    about = describe_device(device)
    if dry:  # nothing is measured, and nothing is claimed
        return {"about": about}
    with torch.inference_mode():
        rates = measure_rates(Clock(device), torch.bfloat16, REPETITIONS)
    return {"about": about, "rates": asdict(rates)}
