"""Tiles of decoding, measured: which are tried, in which order, and what they take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import isinf
from pathlib import Path
from typing import Any

import torch

from ...checked import JsonObject
from ...checkpoint.files import KERNEL_CONFIG, write_text
from ...checkpoint.kernel_config import KernelConfig, LayerKernels, Tile
from ...checkpoint.layout import LayerLayout
from ...errors import UsageError
from ...kernels.launch import capability_of
from ...models.compressed import CompressedCheckpoint
from .attention import TOLERANCE, Problem, kernel, random_problem, relative_error

SHAPES = (64, 1), (64, 2), (64, 4), (32, 1), (32, 2), (32, 4), (128, 4)
"""Keys of a tile and warps that are tried."""

STAGES = (1, 2, 3, 4)
WARPS_PER_SM = (4, 8, 16, 32)
"""Warps of all programs that decoding starts on an SM."""

MOST_SLICES = 64
"""Programs on an SM that kernel_config.json takes at most."""

FINALISTS = 3
"""Tiles that are tried with every number of programs."""

Seconds = Callable[[LayerKernels], float]
"""Seconds of a step; infinite for kernels that do not compile, do not fit or are wrong."""


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here.", "Run it on the GPU that is to serve.")


def step_seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call replayed from a CUDA graph."""
    from triton.testing import do_bench_cudagraph

    return 1e-3 * do_bench_cudagraph(call, return_mode="median")


def tune(folder: Path, batch_size: int = 8, tokens: int = 32768) -> list[JsonObject]:
    """Measure tiles, warps, stages and slices of decoding for every kind of layer, and write the fastest into the
    checkpoint's kernel_config.json, for this GPU's architecture.

    Returns:
        Of each kind of layer: its name, the seconds before and after, and what was chosen.
    """
    _check_gpu()
    checkpoint, device = CompressedCheckpoint(folder), torch.device("cuda")
    config, chosen, records = checkpoint.kernel_config, {}, []
    for layout, launched in dict.fromkeys(zip(checkpoint.layouts, config.layers, strict=True)):
        generator = torch.Generator(device).manual_seed(0)
        problem = random_problem(layout, checkpoint.shape, batch_size, 1, tokens, torch.bfloat16, generator)
        truth = problem.unrounded()
        times = dict(search(launched, layout, capability_of(device), lambda kernels: _seconds(problem, truth, kernels)))  # noqa: B023
        best = min(times, key=lambda kernels: times[kernels])
        chosen[layout, launched] = best
        records.append(
            {"layer": launched.layout, "before_s": times[launched], "after_s": times[best], "kernels": asdict(best)}
        )
    layers = tuple(chosen[pair] for pair in zip(checkpoint.layouts, config.layers, strict=True))
    tuned = KernelConfig(layers)
    tuned.check(checkpoint.layouts)
    write_text(folder / KERNEL_CONFIG, json.dumps(tuned.to_dict(), indent=2) + "\n")
    return records


def search(
    so_far: LayerKernels, layout: LayerLayout, capability: int, seconds: Seconds
) -> Iterator[tuple[LayerKernels, float]]:
    """Try the layer's own kernels and materialising; each tile, with as many warps on an SM as its own has; then the
    fastest tiles with more and fewer programs.
    """
    times = {so_far: seconds(so_far)}
    yield so_far, times[so_far]
    for tried in launches(so_far, layout, capability):
        if tried not in times:
            times[tried] = seconds(tried)
            yield tried, times[tried]
    for best in sorted(times, key=lambda kernels: times[kernels])[:FINALISTS]:
        for warps in WARPS_PER_SM:
            tried = with_tile(best, capability, best.tile(capability), warps)
            if tried not in times and not isinf(times[best]):
                times[tried] = seconds(tried)
                yield tried, times[tried]
    materialised = replace(so_far, materialise=True)
    if materialised not in times:
        yield materialised, seconds(materialised)


def tiles(tile: Tile, layout: LayerLayout) -> list[Tile]:
    """Tiles that are tried for a layer, its own tile first: its keys, warps and stages changed.

    No tile is above a block of positions.
    """
    most = max(16, layout.rope_block or 128)
    candidates = [tile]
    candidates += [replace(tile, keys=keys, warps=warps) for keys, warps in SHAPES if keys <= most]
    candidates += [replace(tile, stages=stages) for stages in STAGES]
    return list(dict.fromkeys(candidates))


def with_tile(kernels: LayerKernels, capability: int, tile: Tile, warps_per_sm: int) -> LayerKernels:
    """A layer's kernels with another tile for an architecture, and programs of so many warps together on an SM."""
    of_architecture: Any = {"sm_90" if capability >= 90 else "sm_80": tile}
    slices = min(MOST_SLICES, max(1, warps_per_sm // tile.warps))
    return replace(kernels, slices_per_sm=slices, materialise=False, **of_architecture)


def launches(kernels: LayerKernels, layout: LayerLayout, capability: int) -> list[LayerKernels]:
    """A layer's kernels with each tile that is tried, its own first."""
    tile = kernels.tile(capability)
    warps = kernels.slices_per_sm * tile.warps
    tried = [kernels, *(with_tile(kernels, capability, each, warps) for each in tiles(tile, layout))]
    return list(dict.fromkeys(tried))


def _seconds(problem: Problem, truth: torch.Tensor, kernels: LayerKernels) -> float:
    call = kernel(problem, kernels)
    try:
        with torch.inference_mode():
            if not relative_error(call(), truth) <= TOLERANCE[problem.query.dtype]:
                return float("inf")
            return step_seconds(call)
    except torch.AcceleratorError:
        raise
    except Exception:  # the compiler has many
        return float("inf")
