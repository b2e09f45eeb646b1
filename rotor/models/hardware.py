"""Where forward passes of a model run: device, dtype, residence of weights, threads, and the rate of a product."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..options import DeviceOptions, MemoryOptions
from .memory import Estimates, stream_weights
from .source import Checkpoint

if TYPE_CHECKING:
    from .weights import Weights

TIMED_MATRIX_SIZE = 512
"""Rows and columns of the matrices whose product is timed."""

TIMED_SECONDS = 0.2
"""Time to measure for."""

PRODUCT_ERROR = 1e-5
"""Largest error of a float32 product of normal numbers, over its norm: float32 has 1e-6, bfloat16 3e-3."""

BFLOAT16_INSTRUCTIONS = "avx512_bf16", "amx_bf16", "sve_bf16"
"""Capabilities of a CPU, as torch names them, with which it multiplies bfloat16 faster than float32."""

BYTES_PER_THREAD = 1 << 25
"""Weights that keep a CPU thread busy: with fewer, threads wait for each other longer than they work."""

DEFAULT_THREADS = torch.get_num_threads()
"""Threads that torch chose at its start."""


@dataclass(frozen=True)
class DevicePlan:
    """Device and dtype of forward passes, and whether weights are read layer by layer."""

    device: torch.device
    dtype: torch.dtype
    streamed: bool = False

    @classmethod
    def choose(cls, options: DeviceOptions, checkpoint_dtype: torch.dtype, averaged: bool = False) -> DevicePlan:
        """The device and dtype that the user named; weights stay in memory unless they are always to be read.

        Args:
            averaged: means over many tokens are computed; see `pick_dtype`.
        Raises:
            UsageError: the device is not there.
        """
        device = pick_device(options.device)
        streamed = isinstance(options, MemoryOptions) and options.offload == "always"
        return cls(device, pick_dtype(options.dtype, checkpoint_dtype, device, averaged), streamed)

    def within_memory(
        self, offload: str, estimates: Estimates, whole: tuple[str, str] | None = None
    ) -> tuple[DevicePlan, str]:
        """The same with weights in memory where they fit, and one line with the estimate; see `stream_weights`."""
        streamed, line = stream_weights(offload, estimates, self.device, whole)
        return replace(self, streamed=streamed), line

    def weights(self, checkpoint: Checkpoint) -> Weights:
        """Open a checkpoint's weights there."""
        from .loading import weights_of  # imports the models of transformers

        return weights_of(checkpoint, self.device, self.dtype, self.streamed)


def fit_threads(weight_bytes: int) -> None:
    """Let torch use as many threads as a model of this size keeps busy, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(DEFAULT_THREADS, weight_bytes // BYTES_PER_THREAD)))


def pick_device(name: str) -> torch.device:
    """Choose a device: `auto` is the GPU if there is one; raises UsageError if the device does not exist."""
    DeviceOptions(device=name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: no CUDA device is available.", "Give --device cpu.")
    return device


def pick_dtype(name: str, checkpoint_dtype: torch.dtype, device: torch.device, averaged: bool = False) -> torch.dtype:
    """Choose a dtype: `auto` is the checkpoint's, except on a CPU, where it is float32.

    Args:
        averaged: means over many tokens are computed, in which rounding averages out, as calibration does. `auto` is
            then bfloat16 for a checkpoint in bfloat16, on a CPU that multiplies such numbers.
    """
    if name == "auto":
        rounded = averaged and checkpoint_dtype == torch.bfloat16 and _multiplies_bfloat16()
        return torch.float32 if device.type == "cpu" and not rounded else checkpoint_dtype
    DeviceOptions(dtype=name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _multiplies_bfloat16() -> bool:
    """Tell whether this CPU has instructions for products of bfloat16; without them such products are slow."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in BFLOAT16_INSTRUCTIONS)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Let oneDNN take the float32 products of a CPU inside the `with`, where that loses no digits.

    torch gives them to MKL, which takes twice as long on CPUs of AMD. The precision `medium` gives them to oneDNN,
    which may round operands to bfloat16, as it does with AMX; so the digits of one product decide.
    """
    if device.type != "cpu" or not _onednn_keeps_digits():
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def _onednn_keeps_digits() -> bool:
    """Tell whether products by the precision `medium` have the digits of float32 on this CPU."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch.backends, beside which torch allows no other way
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(TIMED_MATRIX_SIZE, TIMED_MATRIX_SIZE, generator=generator) for _ in range(2))
    expected = left.double() @ right.double()
    torch.set_float32_matmul_precision("medium")
    try:
        error = torch.linalg.norm(left @ right - expected) / torch.linalg.norm(expected)
    finally:
        torch.set_float32_matmul_precision(before)
    return float(error) < PRODUCT_ERROR


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations per second of a matrix product."""
    from torch.utils.benchmark import Timer  # imports setuptools

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(TIMED_MATRIX_SIZE, TIMED_MATRIX_SIZE, generator=generator).to(device, dtype)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads())
    with fast_products(device):
        measured = timer.blocked_autorange(min_run_time=TIMED_SECONDS)
    return 2 * TIMED_MATRIX_SIZE**3 / measured.mean
