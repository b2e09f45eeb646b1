"""Tiles for a checkpoint, measured on the GPU that is to serve it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.atomic import write_text
from ...checkpoint.file_names import KERNEL_CONFIG
from ...checkpoint.kernel_config import KernelConfig, LayerKernels, Tile
from ...checkpoint.layout import LayerLayout
from ...errors import UsageError
from ...kernels.launch import capability_of
from ...models.compressed import CompressedCheckpoint
from .attention import TOLERANCE, Problem, kernel, random_problem, relative_error

KEYS, WARPS, STAGES, SLICES = (16, 32, 64, 128), (1, 2, 4), (1, 2, 3), (2, 4, 8, 16)
"""What tuning tries."""


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here.", "Run it on the GPU that is to serve.")


def step_seconds(call: Callable[[], Any]) -> float:
    """Of a call replayed from a CUDA graph, the median."""
    from triton.testing import do_bench_cudagraph

    return 1e-3 * do_bench_cudagraph(call, return_mode="median")


def tune(folder: Path, batch_size: int = 8, tokens: int = 32768) -> list[dict[str, Any]]:
    """Measure tiles, warps, stages and slices of decoding for every kind of layer, and write the fastest into the
    checkpoint's kernel_config.json, for this GPU's architecture.

    Returns:
        Of each kind of layer: its name, the seconds before and after, and what was chosen.
    """
    _check_gpu()
    checkpoint, device = CompressedCheckpoint(folder), torch.device("cuda")
    architecture = "sm_90" if capability_of(device) >= 90 else "sm_80"
    config, chosen, records = checkpoint.kernel_config, {}, []
    for layout, own in dict.fromkeys(zip(checkpoint.layouts, config.layers, strict=True)):
        generator = torch.Generator(device).manual_seed(0)
        problem = random_problem(layout, checkpoint.shape, batch_size, 1, tokens, torch.bfloat16, generator)
        exact = problem.exact()
        tried = dict.fromkeys([own, *candidates(own, layout, architecture)])
        times = {kernels: _seconds(problem, exact, kernels) for kernels in tried}
        best = min(times, key=lambda kernels: times[kernels])
        chosen[layout, own] = best
        records.append({"layer": own.layout, "before_s": times[own], "after_s": times[best], "kernels": asdict(best)})
    layers = tuple(chosen[pair] for pair in zip(checkpoint.layouts, config.layers, strict=True))
    tuned = KernelConfig(layers)
    tuned.check(checkpoint.layouts)
    write_text(folder / KERNEL_CONFIG, json.dumps(tuned.to_dict(), indent=2) + "\n")
    return records


def candidates(own: LayerKernels, layout: LayerLayout, architecture: str) -> Iterator[LayerKernels]:
    """No tile is above a block of positions."""
    most = max(16, layout.rope_block or max(KEYS))
    for keys, warps, stages, slices in product((k for k in KEYS if k <= most), WARPS, STAGES, SLICES):
        tile: Any = {architecture: Tile(keys, warps, stages)}
        yield replace(own, slices_per_sm=slices, materialise=False, **tile)
    yield replace(own, materialise=True)


def _seconds(problem: Problem, exact: torch.Tensor, kernels: LayerKernels) -> float:
    """Of a step; infinite for a tile that does not compile or is wrong."""
    call = kernel(problem, kernels)
    try:
        with torch.inference_mode():
            if not relative_error(call(), exact) <= TOLERANCE[problem.query.dtype]:
                return float("inf")
            return step_seconds(call)
    except torch.AcceleratorError:
        raise
    except Exception:  # the compiler has many
        return float("inf")
