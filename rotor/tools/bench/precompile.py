"""Compile a checkpoint's kernels ahead of time, for GPUs that need not be there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...checkpoint.kernel_config import LayerKernels, layout_class
from ...checkpoint.layout import AttentionShape, LayerLayout
from ...errors import UsageError
from ...kernels.dispatch import triton_installed
from ...kernels.launch import shared_bytes
from ...models.compressed import CompressedCheckpoint
from ...progress import Progress
from ...versions import pip_install

if TYPE_CHECKING:
    from .variants import Variant

ARCHS = (80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
"""Compute capabilities that kernels are compiled for: of an older or an unknown one the compiler ends the process."""


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


def subjects_of(folder: Path) -> list[Subject]:
    """The distinct layers of a compressed checkpoint, by its kernel_config.json.

    Raises:
        CheckpointError: not a compressed checkpoint; no kernel configuration, or nonsense in it.
    """
    checkpoint = CompressedCheckpoint(folder)
    alike = Counter(zip(checkpoint.layouts, checkpoint.kernel_config.layers, strict=True))
    softcap = bool(getattr(checkpoint.config.get_text_config(), "attn_logit_softcapping", None))
    return [
        Subject(layout_class(layout), count, layout, kernels, checkpoint.shape, checkpoint.dtype, 0, softcap)
        for (layout, kernels), count in alike.items()
    ]


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


@dataclass(frozen=True)
class CompiledKernel:
    """One specialisation for one architecture; `error` is the compiler's.

    shared_bytes, warps: of a program.
    """

    name: str
    arch: str
    warps: int
    shared_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class CompiledLayer:
    """A layer's kernels on one architecture; layers: how many are alike."""

    layout: str
    arch: str
    layers: int
    kernels: tuple[CompiledKernel, ...]


def compile_layers(
    subjects: Iterable[Subject], archs: Sequence[int], progress: Progress | None = None
) -> list[CompiledLayer]:
    """Compile every kernel that layers need; Triton's cache keeps what comes out.

    Raises:
        UsageError: Triton is not installed.
    """
    if not triton_installed():
        raise UsageError("Triton, which compiles the kernels, is not installed.", pip_install("kernels"))
    from .variants import layer_variants

    compiled = []
    for arch, subject in product(archs, subjects):
        variants, kernels = layer_variants(subject, arch), []
        with (progress or Progress()).task(f"compile {subject.name}, sm_{arch}", len(variants), "kernels") as advance:
            for variant in variants:
                kernels.append(_compile(variant, arch))
                advance(1)
        compiled.append(CompiledLayer(subject.name, f"sm_{arch}", subject.layers, tuple(kernels)))
    return compiled


def _compile(variant: Variant, arch: int) -> CompiledKernel:
    """Compile one kernel; the error of one that fails is kept, so that it does not hide the others.

    Triton compares the shared memory that a kernel asks for with the GPU's when it is launched, and not here.
    """
    shared, most, error = None, shared_bytes(arch), None
    try:
        shared = int(variant.compile().metadata.shared)
        if shared > most:
            error = f"a program asks for {shared:,} bytes of shared memory, sm_{arch} has {most:,}"
    except Exception as failure:  # the compiler has many
        error = " ".join(f"{type(failure).__name__}: {failure}".split())
    return CompiledKernel(variant.name, f"sm_{arch}", variant.warps, shared, error)
