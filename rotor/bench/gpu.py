"""What a GPU is asked first: the tests marked `gpu`, also below NVIDIA's sanitizer; and tiles for a checkpoint.

The tests are those of a checkout. tests/kernels/test_gpu_layouts.py measures attention of the named layouts, and
appends what it finds to the file that ROTOR_GPU_RESULTS names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..format.atomic import write_text
from ..format.file_names import KERNEL_CONFIG
from ..format.kernel_config import KernelConfig, LayerKernels, Tile
from ..format.layout import LayerLayout
from ..kernels.launch import capability_of
from ..models.compressed import CompressedCheckpoint
from .attention import TOLERANCE, Problem, kernel, random_problem, relative_error

ROOT = Path(__file__).resolve().parents[2]
"""Of a checkout: tests/ lies there."""

LAYOUTS = "tests/kernels/test_gpu_layouts.py"
RESULTS, DRY = "ROTOR_GPU_RESULTS", "ROTOR_GPU_DRY"
"""Environment variables: the file of results, and whether toys are measured in Triton's interpreter."""

KEYS, WARPS, STAGES, SLICES = (16, 32, 64, 128), (1, 2, 4), (1, 2, 3), (2, 4, 8, 16)
"""What tuning tries."""


def run(out: Path, dry: bool = False) -> dict[str, str]:
    """Run the tests, then small cases of each layout below memcheck and racecheck, then measure.

    Args:
        out: JSON lines, one of each measurement. dry: toy sizes in Triton's interpreter, on a CPU.
    Returns:
        Of each part "ok", or why not.
    Raises:
        UsageError: no GPU, no checkout, a file that cannot be written.
    """
    if not dry and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here.", "See that it would run: rotor gpu --dry")
    if not (ROOT / LAYOUTS).exists():
        raise UsageError("the tests are not here: rotor gpu runs from a checkout.", "Clone the repository.")
    out.write_text("", "utf-8")
    environment = {**os.environ, RESULTS: str(out.resolve())}
    if dry:
        environment |= {DRY: "1", "TRITON_INTERPRET": "1", "ROTOR_ATTENTION": "triton"}
    pytest = (sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu")
    small, sanitizer = (*pytest, LAYOUTS, "-k", "small"), ("compute-sanitizer", "--error-exitcode", "99", "--tool")
    parts = {
        "tests": (*pytest, "tests/kernels/test_gpu.py", "tests", "--deselect", LAYOUTS),
        "memcheck": small if dry else (*sanitizer, "memcheck", *small),
        "racecheck": (*sanitizer, "racecheck", *small),
        "measure": (*pytest, LAYOUTS, "-k", "measure"),
    }
    if dry:
        del parts["tests"], parts["racecheck"]
    return {name: _outcome(name, call, environment) for name, call in parts.items()}


def _outcome(name: str, call: tuple[str, ...], environment: dict[str, str]) -> str:
    if not shutil.which(call[0]):
        return f"skipped: {call[0]} is not installed"
    # PyTorch's own memory pool hides what is read beyond a tensor.
    more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if name == "memcheck" else {}
    done = subprocess.run(call, cwd=ROOT, env=environment | more, stdout=sys.stderr)
    return "ok" if done.returncode == 0 else f"failed: exit code {done.returncode}"


def step_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of a call replayed from a CUDA graph, the median; on a CPU of one call."""
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        return 1e-3 * do_bench_cudagraph(call, return_mode="median")
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tune(folder: Path, batch_size: int = 8, tokens: int = 32768, dry: bool = False) -> list[dict[str, Any]]:
    """Measure tiles, warps, stages and slices of decoding for every kind of layer, and write the fastest into the
    checkpoint's kernel_config.json, for this GPU's architecture.

    Returns:
        Of each kind of layer: its name, the seconds before and after, and what was chosen.
    """
    checkpoint, device = CompressedCheckpoint(folder), torch.device("cpu" if dry else "cuda")
    if not dry and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here to measure on.", "Run it on the GPU that is to serve.")
    dtype, load = (torch.float32, (1, 1, 70)) if dry else (torch.bfloat16, (batch_size, 1, tokens))
    architecture = "sm_90" if capability_of(device) >= 90 else "sm_80"
    config, chosen, records = checkpoint.kernel_config, {}, []
    for layout, own in dict.fromkeys(zip(checkpoint.layouts, config.layers, strict=True)):
        problem = random_problem(layout, checkpoint.shape, *load, dtype, torch.Generator(device).manual_seed(0))
        exact = problem.exact()
        tried = [own, *candidates(own, layout, architecture)][: 4 if dry else None]
        times = {kernels: _seconds(problem, exact, kernels) for kernels in dict.fromkeys(tried)}
        best = min(times, key=lambda kernels: times[kernels])
        chosen[layout, own] = best
        records.append({"layer": own.layout, "before_s": times[own], "after_s": times[best], "kernels": best.to_dict()})
    layers = tuple(chosen[pair] for pair in zip(checkpoint.layouts, config.layers, strict=True))
    tuned = KernelConfig(layers, config.cache)
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
            return step_seconds(call, problem.key.device)
    except torch.AcceleratorError:
        raise
    except Exception:  # the compiler has many
        return float("inf")
