"""Count what a decode step's kernels issue, on GPUs that need not be there.

    python artifacts/gpu count --named --arch sm_80,sm_90 --json

Of every kernel of a step the instructions in its machine code are counted (`sass`), and how long they keep the pipes of
an SM busy (`cycles`), per key and KV head of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from rotor import Progress
from rotor.calibration.prediction.cost import LayerTime, layer_bytes, uncompressed_layer_time
from rotor.calibration.prediction.devices import find_device
from rotor.tools.bench.precompile import Subject
from rotor.tools.bench.variants import Variant, layer_variants

from .cycles import PATH, PATH_BYTES, SHARED_BYTES, busy, resident_warps
from .sass import Graph, disassemble, usage
from .subjects import STEP
from .work import Work, work_of

DEVICE_OF_ARCH = {80: "a100-80g", 89: "l40s", 90: "h200", 100: "b200"}
"""Whose rates predictions for an architecture take."""


@dataclass(frozen=True)
class Kernel:
    """One specialisation for one architecture; `error` is the compiler's, or says why nothing could be counted.

    registers, spilled_bytes: of a thread. shared_bytes, warps: of a program.
    instructions_per_key: warp instructions a key and KV head of the layer; None for a kernel whose work is not by keys.
    path_bytes_per_key: bytes on the path to shared memory and L1, cycles_per_key: cycles of an SM by pipe; None for the
    same kernels.
    """

    name: str
    arch: str
    warps: int
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    instructions_per_key: float | None = None
    path_bytes_per_key: float | None = None
    cycles_per_key: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class CountedLayer:
    """A layer's step on one architecture.

    layers: that are alike. instructions_per_key, path_bytes_per_key: of all kernels of its step, a key and KV head.
    spilled_bytes: the most of a kernel of it. share: of the uncompressed layer's predicted time of attention.
    limit: the pipe of an SM that decoding keeps busy for longest. share_of_limit: as `share`, were each kernel as fast
        as its busiest pipe lets it be; None where the pipes' rates are not known.
    """

    layout: str
    arch: str
    layers: int
    instructions_per_key: float | None
    spilled_bytes: int
    bytes_per_key: float
    path_bytes_per_key: float | None
    share: float | None
    limit: str | None
    share_of_limit: float | None
    kernels: tuple[Kernel, ...]


def count_layers(
    subjects: Iterable[Subject], archs: Sequence[int], progress: Progress | None = None, step_alone: bool = False
) -> list[CountedLayer]:
    """Compile every kernel that layers need and count those of a decode step; Triton's cache keeps what comes out.

    Args:
        step_alone: compile no others than those.
    """
    counted = []
    for arch, subject in product(archs, subjects):
        found = [(variant, work_of(variant, subject.kernels, arch)) for variant in layer_variants(subject, arch)]
        chosen = [(variant, work) for variant, work in found if work.keys or not step_alone]
        kernels = []
        with (progress or Progress()).task(f"compile {subject.name}, sm_{arch}", len(chosen), "kernels") as advance:
            for variant, work in chosen:
                kernels.append(_kernel(variant, work, arch, subject.shape.num_kv_heads))
                advance(1)
        counted.append(_layer(subject, arch, tuple(kernels)))
    return counted


def _kernel(variant: Variant, work: Work, arch: int, kv_heads: int) -> Kernel:
    """Compile and count one; of a kernel that fails, why: others must not be hidden by it."""
    registers = spilled = shared = a_key = path_bytes = error = None
    cycles: dict[str, float] = {}
    try:
        compiled = variant.compile()
        cubin, shared = compiled.asm["cubin"], int(compiled.metadata.shared)
        registers, spilled = usage(cubin)
        if work.keys:
            graph, per_key = Graph(disassemble(cubin)), variant.warps * work.groups / (work.keys * kv_heads)
            a_key = graph.count(work.loops) * per_key
            if arch in SHARED_BYTES:
                held = resident_warps(arch, registers, shared, variant.warps, work.programs)
                cycles = {pipe: own * per_key for pipe, own in busy(graph, work.loops, arch, held).items()}
                path_bytes = cycles[PATH] * PATH_BYTES
    except Exception as failure:  # the compiler has many
        error = " ".join(f"{type(failure).__name__}: {failure}".split())
    about = variant.name, f"sm_{arch}", variant.warps, registers, spilled, shared
    return Kernel(*about, a_key, path_bytes, cycles, error)


def _layer(subject: Subject, arch: int, kernels: tuple[Kernel, ...]) -> CountedLayer:
    counts = [kernel.instructions_per_key for kernel in kernels if kernel.instructions_per_key is not None]
    a_key = None if any(kernel.error for kernel in kernels) else sum(counts)
    size, heads = layer_bytes(subject.layout, subject.shape, subject.dtype.itemsize), subject.shape.num_kv_heads
    step = [kernel for kernel in kernels if kernel.instructions_per_key]
    known = a_key is not None and all(kernel.cycles_per_key for kernel in step)
    path_bytes = sum(kernel.path_bytes_per_key or 0.0 for kernel in step) if known else None
    share = limit = of_limit = None
    if arch in DEVICE_OF_ARCH and a_key is not None:
        device = find_device(DEVICE_OF_ARCH[arch])
        whole = uncompressed_layer_time(subject.shape, device, STEP).attention_s
        share = LayerTime.of(STEP.keys * size, STEP.keys * heads * a_key, 0.0, device).attention_s / whole
        if known and step:
            cycles = sum(max(kernel.cycles_per_key.values()) for kernel in step)
            of_limit = max(device.read_seconds(STEP.keys * size), STEP.keys * heads * device.seconds(cycles)) / whole
            longest = max(step, key=lambda kernel: max(kernel.cycles_per_key.values())).cycles_per_key
            limit = max(longest, key=longest.__getitem__)
    spilled = max((kernel.spilled_bytes or 0 for kernel in step), default=0)
    about = subject.name, f"sm_{arch}", subject.layers, a_key, spilled
    return CountedLayer(*about, size / heads, path_bytes, share, limit, of_limit, kernels)
