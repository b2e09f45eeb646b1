"""Compile kernels ahead of time, for GPUs that need not be there, and count what a decode step issues.

Of every kernel of a step the instructions in its machine code are counted (`sass`), per key and KV head of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ...calibration.prediction.cost import LayerTime, layer_bytes, uncompressed_layer_time
from ...calibration.prediction.devices import find_device
from ...errors import UsageError
from ...installing import pip_install
from ...kernels.dispatch import triton_installed
from ...progress import Progress
from .subjects import STEP, Subject

if TYPE_CHECKING:
    from .variants import Variant

ARCHS = (80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
"""Compute capabilities that kernels are compiled for: of an older or an unknown one the compiler ends the process."""

DEVICE_OF_ARCH = {80: "a100-80g", 89: "l40s", 90: "h200", 100: "b200"}
"""Whose rates predictions for an architecture take."""


@dataclass(frozen=True)
class Kernel:
    """One specialisation for one architecture; `error` is the compiler's, or says why nothing could be counted.

    registers, spilled_bytes: of a thread. shared_bytes, warps: of a program.
    instructions_per_key: warp instructions a key and KV head of the layer; None for a kernel whose work is not by keys.
    """

    name: str
    arch: str
    warps: int
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    instructions_per_key: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class CountedLayer:
    """A layer's step on one architecture.

    layers: that are alike. instructions_per_key: of all kernels of its step, a key and KV head.
    spilled_bytes: the most of a kernel of it. share: of the uncompressed layer's predicted time of attention.
    """

    layout: str
    arch: str
    layers: int
    instructions_per_key: float | None
    spilled_bytes: int
    bytes_per_key: float
    share: float | None
    kernels: tuple[Kernel, ...]


def parse_archs(text: str) -> list[int]:
    """Parse `sm_80,sm_90` as compute capabilities, 80 and 90.

    Raises:
        UsageError: not of that form.
    """
    known = {f"sm_{number}": number for number in ARCHS}
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if wrong := [name for name in names if name not in known]:
        message = f"--arch {text}: {wrong[0]!r} is no architecture that is compiled for."
        raise UsageError(message, f"Known are {', '.join(known)}.")
    return [known[name] for name in names]


def count_layers(
    subjects: Iterable[Subject], archs: Sequence[int], progress: Progress | None = None
) -> list[CountedLayer]:
    """Compile every kernel that layers need and count those of a decode step; Triton's cache keeps what comes out.

    Raises:
        UsageError: Triton is not installed.
    """
    if not triton_installed():
        raise UsageError("Triton, which compiles the kernels, is not installed.", pip_install("kernels"))
    from .variants import layer_variants

    counted = []
    for arch, subject in product(archs, subjects):
        variants, kernels = layer_variants(subject, arch), []
        with (progress or Progress()).task(f"compile {subject.name}, sm_{arch}", len(variants), "kernels") as advance:
            for variant in variants:
                kernels.append(_kernel(variant, arch, subject.shape.num_kv_heads))
                advance(1)
        counted.append(_layer(subject, arch, tuple(kernels)))
    return counted


def _kernel(variant: Variant, arch: int, kv_heads: int) -> Kernel:
    """Compile and count one; of a kernel that fails, why: others must not be hidden by it."""
    from .sass import Graph, disassemble, usage

    registers = spilled = shared = a_key = error = None
    try:
        compiled = variant.compile()
        cubin, shared = compiled.asm["cubin"], int(compiled.metadata.shared)
        registers, spilled = usage(cubin)
        if variant.keys:
            counted = Graph(disassemble(cubin)).count(variant.loops)
            a_key = counted * variant.warps * variant.groups / (variant.keys * kv_heads)
    except Exception as failure:  # the compiler has many
        error = " ".join(f"{type(failure).__name__}: {failure}".split())
    return Kernel(variant.name, f"sm_{arch}", variant.warps, registers, spilled, shared, a_key, error)


def _layer(subject: Subject, arch: int, kernels: tuple[Kernel, ...]) -> CountedLayer:
    counts = [kernel.instructions_per_key for kernel in kernels if kernel.instructions_per_key is not None]
    a_key = None if any(kernel.error for kernel in kernels) else sum(counts)
    size, heads = layer_bytes(subject.layout, subject.shape, subject.dtype.itemsize), subject.shape.num_kv_heads
    share = None
    if arch in DEVICE_OF_ARCH and a_key is not None:
        device = find_device(DEVICE_OF_ARCH[arch])
        time = LayerTime.of(STEP.keys * size, STEP.keys * heads * a_key, 0.0, device)
        share = time.attention_s / uncompressed_layer_time(subject.shape, device, STEP).attention_s
    spilled = max((kernel.spilled_bytes or 0 for kernel in kernels if kernel.instructions_per_key), default=0)
    about = subject.name, f"sm_{arch}", subject.layers, a_key, spilled
    return CountedLayer(*about, size / heads, share, kernels)
