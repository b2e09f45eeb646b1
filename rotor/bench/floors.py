"""What is predicted of compiled kernels at a load: `rotor compile` prints it, and `--json` has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..kernels.occupancy import programs_per_sm
from ..models.compressed import CompressedCheckpoint
from ..prediction.devices import Device
from ..prediction.kernels import FEW, PROMPTS, SHARED, STEPS, Floor, Launch, Load, predicted_floor
from .precompile import Compiled, kernel_dtype, variants_of_layers

DEVICE_OF_ARCH = {80: "a100-80g", 89: "l40s", 90: "h200", 100: "b200"}
"""Whose rates are taken for an architecture where none is named."""

FEW_QUERIES = 16
"""New tokens behind a long cache, of the load at which a kernel is predicted that splits keys for few queries."""


def with_floors(
    folder: Path,
    kernels: Sequence[Compiled],
    device_of: dict[str, Device],
    *,
    dtype: str = "auto",
    batch_sizes: Sequence[int] = (1,),
    lengths: Sequence[int] = (32768,),
    prompts: Sequence[int] = (8192,),
) -> list[Compiled]:
    """Each kernel with its predicted floors; without where it failed, its device or its work is not known.

    Args:
        folder: what the kernels were compiled for. kernels, dtype, batch_sizes: of `precompile`.
        device_of: rates by architecture, as in `sm_90`.
        lengths: cached tokens of each sequence of a decode step. prompts: tokens of a prompt.
    """
    checkpoint = CompressedCheckpoint(folder)
    element_bytes = kernel_dtype(checkpoint.config.dtype, dtype).itemsize
    steps = [Load(batch, 1, length - 1) for batch in batch_sizes for length in lengths]
    prefills = [Load(1, length) for length in prompts]
    layers = {
        (arch, variant.name, _key(variant.constants)): layouts
        for arch in {kernel.arch for kernel in kernels}
        for variant, layouts in variants_of_layers(folder, dtype, batch_sizes, int(arch[3:]))
    }
    found = []
    for kernel in kernels:
        device = device_of.get(kernel.arch)
        layouts = layers.get((kernel.arch, kernel.name, _key(kernel.constants)), [])
        if kernel.error is not None or device is None or not layouts:
            found.append(kernel)
            continue
        kind = kernel.name.partition(" ")[0]
        loads = steps if kind in STEPS else prefills if kind in PROMPTS else [*steps, *prefills]
        if kind in FEW:
            loads = [Load(step.batch_size, FEW_QUERIES, max(0, step.keys - FEW_QUERIES)) for step in steps]
        if kernel.batch_size is not None:  # of a decode step: the loads that this one is launched for
            loads = [load for load in loads if 1 << (load.batch_size - 1).bit_length() == kernel.batch_size]
        served = layouts[:1] if kind in SHARED else layouts
        launches = [Launch(kind, kernel.constants, layout, checkpoint.shape, element_bytes) for layout in served]
        found.append(replace(kernel, floors=tuple(_floors(kernel, launches, loads, device))))
    return found


def _floors(kernel: Compiled, launches: list[Launch], loads: list[Load], device: Device) -> list[Floor]:
    assert kernel.shared_bytes is not None  # it was compiled
    programs = programs_per_sm(kernel.warps, kernel.shared_bytes, int(kernel.arch[3:]), kernel.registers)
    floors = (predicted_floor(launches, load, device, programs, kernel.flight_bytes or {}) for load in loads)
    return [floor for floor in floors if floor is not None]


def _key(constants: dict[str, object]) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(constants.items()))
