"""Compile kernels ahead of time, for GPUs that need not be there, and count what a decode step issues.

Of every kernel of a step the instructions in its machine code are counted (`sass`), per key and KV head of the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..format.channels import Channels, Numbers
from ..format.kernel_config import LayerKernels, layout_class
from ..format.layout import AttentionShape, GroupLayout, LayerLayout
from ..installing import pip_install
from ..kernels.defaults import default_layer
from ..kernels.dispatch import triton_installed
from ..models.compressed import CompressedCheckpoint
from ..prediction.cost import DecodeStep, LayerTime, layer_bytes, uncompressed_layer_time
from ..prediction.devices import find_device
from ..prediction.instructions import HEAD_DIM, Specialisation
from ..progress import Progress

if TYPE_CHECKING:
    from .variants import Variant

ARCHS = (80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
"""Compute capabilities that kernels are compiled for: of an older or an unknown one the compiler ends the process."""

DEVICE_OF_ARCH = {80: "a100-80g", 89: "l40s", 90: "h200", 100: "b200"}
"""Whose rates predictions for an architecture take."""

STEP = DecodeStep(context_tokens=32768, batch_size=8)
"""Whose instructions are counted, a key, and whose time is predicted."""

PAGE = 64
"""Keys of a page, in layers that no checkpoint has."""


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


@dataclass(frozen=True)
class Subject:
    """A layer to be compiled: its name, how many are alike, its kernels' configuration, and the model's sizes."""

    name: str
    layers: int
    layout: LayerLayout
    kernels: LayerKernels
    shape: AttentionShape
    dtype: torch.dtype
    page: int = 0
    softcap: bool = False

    def compiled(self, arch: int, progress: Progress | None = None) -> tuple[Kernel, ...]:
        """Every kernel that the layer needs.

        Raises:
            UsageError: Triton is not installed.
        """
        if not triton_installed():
            raise UsageError("Triton, which compiles the kernels, is not installed.", pip_install("kernels"))
        from .variants import layer_variants

        variants = layer_variants(self, arch)
        with (progress or Progress()).task(f"compile {self.name}, sm_{arch}", len(variants), "kernels") as advance:
            found = []
            for variant in variants:
                found.append(_kernel(variant, arch, self.shape.num_kv_heads))
                advance(1)
        return tuple(found)


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


def subjects_of(folder: Path) -> list[Subject]:
    """The distinct layers of a compressed checkpoint, by its kernel_config.json.

    Raises:
        CheckpointError: not a compressed checkpoint; no kernel configuration, or nonsense in it.
    """
    checkpoint = CompressedCheckpoint(folder)
    alike = Counter(zip(checkpoint.layouts, checkpoint.kernel_config.layers, strict=True))
    softcap = bool(getattr(checkpoint.config, "attn_logit_softcapping", None))
    return [
        Subject(layout_class(layout), count, layout, kernels, checkpoint.shape, checkpoint.dtype, 0, softcap)
        for (layout, kernels), count in alike.items()
    ]


NAMED = {
    "joint-64-fast": Specialisation("joint", 64, 4, 16),
    "joint-128-fast": Specialisation("joint", 128, 4, 16),
    "joint-128x2-fast": Specialisation("joint", 128, 8, 16, 2),
    "joint-256x4-fast": Specialisation("joint", 256, 16, 16, 4),
    "joint-64": Specialisation("joint", 64, 4),
    "joint-128": Specialisation("joint", 128, 4),
    "apart-64": Specialisation("apart", 64, 4),
    "numbers-64": Specialisation("numbers", 64, 4),
}
"""Layers that are counted without a checkpoint: 4 query heads a KV head."""


def subject_of(name: str, of: Specialisation) -> Subject:
    """A layer of 8 KV heads of HEAD_DIM: joint latents in blocks, or those apart after RoPE; bfloat16, in pages."""
    latent = Numbers(of.width) if of.kind == "numbers" else Channels(n4=of.width)
    values, block = (None, of.rope_block) if of.kind == "joint" else (latent, None)
    groups = (GroupLayout(tuple(range(i, i + of.kv_heads)), latent, values) for i in range(0, 8, of.kv_heads))
    layout = LayerLayout(tuple(groups), block, of.fast_planes)
    shape = AttentionShape(1, len(layout.groups) * of.rows, 8, HEAD_DIM, 4096, rotary_dim=HEAD_DIM)
    return Subject(name, 1, layout, default_layer(layout), shape, torch.bfloat16, PAGE)


def named_subjects() -> dict[str, Subject]:
    return {name: subject_of(name, of) for name, of in NAMED.items()}


def count_layers(
    subjects: Iterable[Subject], archs: Sequence[int], progress: Progress | None = None
) -> list[CountedLayer]:
    """Compile every kernel that layers need and count those of a decode step; Triton's cache keeps what comes out.

    Raises:
        UsageError: Triton is not installed.
    """
    return [_layer(subject, arch, subject.compiled(arch, progress)) for arch in archs for subject in subjects]


def _kernel(variant: Variant, arch: int, kv_heads: int) -> Kernel:
    """Compile and count one; of a kernel that fails, why: others must not be hidden by it."""
    from .sass import CountError, Graph, disassemble, usage

    about = variant.name, f"sm_{arch}", variant.warps
    try:
        compiled = variant.compile()
    except Exception as error:  # the compiler has many
        return Kernel(*about, error=" ".join(f"{type(error).__name__}: {error}".split()))
    cubin = compiled.asm["cubin"]
    takes = *usage(cubin), int(compiled.metadata.shared)
    if not variant.keys:
        return Kernel(*about, *takes)
    try:
        counted = Graph(disassemble(cubin)).count(variant.loops)
    except CountError as error:
        return Kernel(*about, *takes, error=f"not counted: {error}")
    return Kernel(*about, *takes, counted * variant.warps * variant.groups / (variant.keys * kv_heads))


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
