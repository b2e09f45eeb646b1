"""Compile the kernels of a compressed checkpoint ahead of time, for GPUs that need not be there."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..format.kernel_config import KernelConfig
from ..format.layout import LayerLayout
from ..installing import pip_install
from ..kernels.dispatch import DTYPES, triton_installed
from ..models.compressed import CompressedCheckpoint
from ..prediction.kernels import Floor
from ..progress import Progress
from ..runtime.families import FAMILIES

ARCHS = (80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
"""Compute capabilities that kernels are compiled for: of an older or an unknown one the compiler ends the process."""


@dataclass(frozen=True)
class Compiled:
    """One specialisation for one architecture; `error` is the compiler's, and then the numbers are None.

    constants: that it is compiled for. mask: whether it reads one. batch_size: largest of a decode step; None where it
    does not matter. warps: of a program.
    registers, spill_bytes: per thread. shared_bytes: per program. async_copies, scalar_loads, matrix_products:
    instructions in the PTX; scalar loads are those of 16 bits. async_bytes: of each argument, the fewest bytes that a
    thread copies asynchronously. flight_bytes: of each argument, bytes that a program has in flight while it computes.
    floors: what is predicted at each load; see `rotor.bench.floors`.
    """

    name: str
    arch: str
    mask: bool
    batch_size: int | None
    seconds: float
    constants: dict[str, Any]
    warps: int
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    async_copies: int | None = None
    scalar_loads: int | None = None
    matrix_products: int | None = None
    async_bytes: dict[str, int] | None = None
    flight_bytes: dict[str, int] | None = None
    error: str | None = None
    floors: tuple[Floor, ...] = ()


def parse_archs(text: str) -> list[int]:
    """Parse `sm_80,sm_90` as compute capabilities, 80 and 90.

    Raises:
        UsageError: not of that form.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not re.fullmatch(r"sm_[1-9][0-9]{1,2}", name) or int(name[3:]) not in ARCHS:
            known = ", ".join(f"sm_{number}" for number in ARCHS)
            raise UsageError(f"--arch {text}: {name!r} is no architecture that is compiled for.", f"Known are {known}.")
    return [int(name[3:]) for name in dict.fromkeys(names)]


def precompile(
    folder: Path,
    archs: Sequence[int],
    *,
    dtype: str = "auto",
    batch_sizes: Sequence[int] = (1,),
    progress: Progress | None = None,
) -> list[Compiled]:
    """Compile every kernel that the folder needs by its kernel_config.json; Triton's cache keeps what comes out.

    Args:
        folder: what `rotor export` wrote.
        archs: compute capabilities, 80, 90, ...
        dtype: of activations and cache; `auto` is the checkpoint's.
        batch_sizes: of the decoding steps; each is rounded up to a power of two.
    Raises:
        UsageError: Triton is not installed; a dtype that kernels do not have.
        CheckpointError: not a compressed checkpoint; no kernel configuration, or nonsense in it.
    """
    variants = {arch: kernel_variants(folder, dtype, batch_sizes, arch) for arch in archs}
    from ..kernels.ahead import compile_variant

    progress = progress or Progress()
    found = []
    with progress.task("compile", sum(len(mine) for mine in variants.values()), "kernels") as advance:
        for arch in archs:
            for variant in variants[arch]:
                begin = time.perf_counter()
                numbers: dict[str, Any]
                try:
                    numbers = vars(compile_variant(variant, arch))
                except Exception as error:  # the compiler has many, and one failure must not hide the others
                    numbers = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
                mask, batch_size = bool(variant.constants.get("MASK")), variant.constants.get("BATCH_PADDED")
                seconds = time.perf_counter() - begin
                warps = variant.options.get("num_warps", 4)  # Triton's own default
                about = mask, batch_size, seconds, dict(variant.constants), warps
                found.append(Compiled(variant.name, f"sm_{arch}", *about, **numbers))
                advance(1)
    return found


def kernel_variants(folder: Path, dtype: str, batch_sizes: Sequence[int], arch: int) -> list[Any]:
    """The distinct variants for a folder on an architecture, of `specialise.model_variants`; see `precompile`."""
    return [variant for variant, _ in variants_of_layers(folder, dtype, batch_sizes, arch)]


def variants_of_layers(
    folder: Path, dtype: str, batch_sizes: Sequence[int], arch: int
) -> list[tuple[Any, list[LayerLayout]]]:
    """The same, each with the layers that launch it."""
    if not triton_installed():
        raise UsageError("Triton, which compiles the kernels, is not installed.", pip_install("kernels"))
    from ..kernels.gpu import Gpu
    from ..kernels.specialise import model_variants

    checkpoint = CompressedCheckpoint(folder)
    config, kernels = checkpoint.config, checkpoint.kernel_config
    chosen = kernel_dtype(config.dtype, dtype)
    softcap = FAMILIES[config.model_type].softcap if config.model_type in FAMILIES else None
    policy = checkpoint.policy
    softened = policy.softens if policy is not None and policy.needs_weights else None
    distinct: dict[Any, tuple[Any, list[LayerLayout]]] = {}
    layers = list(zip(checkpoint.default_layouts, kernels.layers, strict=True))
    for batch_size in batch_sizes:
        for (layout, of_layer), count in Counter(layers).items():
            for variant in model_variants(
                KernelConfig(kernels.schedule, (of_layer,)),
                [layout],
                checkpoint.shape,
                chosen,
                batch_size=batch_size,
                softcap=bool(softcap and getattr(config, softcap, None)),
                softened=softened,
                gpu=Gpu.of_capability(arch),
            ):
                key = variant.name, tuple(sorted(variant.constants.items(), key=lambda item: item[0]))
                found = distinct.setdefault(key, (variant, []))[1]
                if layout not in found:  # another batch size may need the same kernel
                    found += [layout] * count
    return list(distinct.values())


def kernel_dtype(own: torch.dtype, name: str) -> torch.dtype:
    """The dtype of activations and cache that kernels are compiled for: by name, or a checkpoint's own with `auto`."""
    by_name = {str(t).removeprefix("torch."): t for t in DTYPES}
    chosen = own if name == "auto" else by_name.get(name)
    if chosen is None or chosen not in DTYPES:
        raise UsageError(f"--dtype {name}: the kernels have {', '.join(by_name)}.", "Choose one of them.")
    return chosen


def cache_folder() -> str:
    """Folder in which Triton keeps what it compiled, and looks for it when a kernel is launched."""
    from triton import knobs

    return str(knobs.cache.dir)
