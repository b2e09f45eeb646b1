"""Where decoding is predicted to gain by interpolating slow rotary planes: what kernel_config.json then says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..format.kernel_config import KernelConfig, SlowPlanes
from ..format.layout import AttentionShape, LayerLayout
from ..kernels.defaults import default_config, with_slow_planes
from ..kernels.slow_planes import TOLERANCE, choices
from .cost import DecodeStep, layer_residency, layer_work
from .devices import Device, find_device

LEAST_GAIN = 1.1
"""By which the predicted time must fall: below that, keys are rebuilt whole."""

CONTEXT_TOKENS = 32768
DEVICE = "h100-sxm"
"""The load and the device of the prediction, one sequence a step."""

MOST_ROWS = 32
"""Query rows of a group: with more the kernel that absorbs them spills registers."""


def planned_config(
    layouts: Sequence[LayerLayout],
    shape: AttentionShape,
    frequencies: Sequence[tuple[float, ...] | None],
    element_bytes: int,
) -> KernelConfig:
    """The kernel configuration of a model by rule, with slow planes interpolated in the layers that gain by it.

    Args:
        frequencies: of each layer's RoPE, as `runtime.rotary_frequencies` gives them.
        element_bytes: of the model's dtype; numbers of four bytes are for checking, and rebuild all.
    """
    config, device = default_config(layouts, shape), find_device(DEVICE)
    layers = [
        with_slow_planes(kernels, None if element_bytes > 2 else fastest(layout, shape, of_layer, device))
        for layout, kernels, of_layer in zip(layouts, config.layers, frequencies, strict=True)
    ]
    return replace(config, layers=tuple(layers))


def fastest(
    layout: LayerLayout, shape: AttentionShape, frequencies: tuple[float, ...] | None, device: Device
) -> SlowPlanes | None:
    """What is predicted to be fastest of all choices within the tolerance of 16-bit numbers; None for whole keys.

    Keys that are turned within blocks of positions, rows of codes (joint latents among them), groups of several widths
    and many query rows are left alone; of all but the first the kernel has no registers left, but it serves them where
    kernel_config.json asks for it.
    """
    widths = {(group.qk_rank, group.v_rank) for group in layout.groups}
    rows = layout.group_size * shape.heads_per_kv
    kept = layout.turned_in_blocks or layout.coded
    if layout.domain != "pre" or kept or len(widths) > 1 or rows > MOST_ROWS or frequencies is None:
        return None

    def seconds(slow: SlowPlanes | None) -> float:
        work = layer_work(layout, shape, DecodeStep(CONTEXT_TOKENS, 1), slow)
        return work.cache_seconds(device, layer_residency(layout, shape, 2, slow))

    best = min(choices(frequencies, TOLERANCE[2]), key=seconds, default=None)
    return best if best is not None and LEAST_GAIN * seconds(best) <= seconds(None) else None
