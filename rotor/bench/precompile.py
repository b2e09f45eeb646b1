"""Compile kernels ahead of time, for GPUs that need not be there, and count what a decode step issues.

Of every kernel of a step the instructions in its machine code are counted (`sass`), per key and KV head of the
layer; a layer's are the sum over the kernels of its step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError
from ..format.channels import Channels, Numbers
from ..format.kernel_config import LayerKernels, layout_class
from ..format.layout import MOST_ROPE_BLOCK, AttentionShape, GroupLayout, LayerLayout
from ..installing import pip_install
from ..kernels.defaults import default_layer
from ..kernels.dispatch import DTYPES, triton_installed
from ..models.compressed import CompressedCheckpoint
from ..prediction.cost import DecodeStep, LayerTime, layer_bytes, uncompressed_layer_time
from ..prediction.devices import Device
from ..prediction.instructions import HEAD_DIM, Counts, Specialisation, grid, table_data
from ..progress import Progress
from .report import write_report

if TYPE_CHECKING:
    from .ahead import Variant

ARCHS = (80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
"""Compute capabilities that kernels are compiled for: of an older or an unknown one the compiler ends the process."""

DEVICE_OF_ARCH = {80: "a100-80g", 89: "l40s", 90: "h200", 100: "b200"}
"""Whose rates are taken for an architecture where none is named."""

PAGE = 64


@dataclass(frozen=True)
class Kernel:
    """One specialisation for one architecture; `error` is the compiler's, or says why nothing could be counted.

    registers, spilled_bytes: of a thread. shared_bytes: of a program. warps: of a program.
    instructions_per_key: warp instructions a key and KV head of the layer; None for a kernel whose work is not by keys.
    by_pipe: the same by execution pipe. loops: warp instructions of one loop's own each time round, and its rounds in
    a program.
    """

    name: str
    arch: str
    warps: int
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    instructions_per_key: float | None = None
    by_pipe: dict[str, float] | None = None
    loops: tuple[tuple[float, float], ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class CountedLayer:
    """A layer's step on one architecture.

    layers: that are alike. instructions_per_key: of all kernels of its step, a key and KV head.
    spilled_bytes: the most of a kernel of it. memory_s, issue_s: the limits of attention. share: of the uncompressed
    layer's attention, the larger of the two.
    """

    layout: str
    arch: str
    layers: int
    instructions_per_key: float | None
    spilled_bytes: int
    by_pipe: dict[str, float]
    bytes_per_key: float
    memory_s: float | None
    issue_s: float | None
    share: float | None
    kernels: tuple[Kernel, ...]


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


@dataclass(frozen=True)
class Subject:
    """A layer to be compiled: its name, how many are alike, its kernels' configuration, and the model's sizes."""

    name: str
    layers: int
    layout: LayerLayout
    kernels: LayerKernels
    shape: AttentionShape
    dtype: torch.dtype = torch.bfloat16
    page: int = PAGE
    softcap: bool = False


def subjects_of(folder: Path, dtype: str) -> list[Subject]:
    """The distinct layers of a compressed checkpoint, by its kernel_config.json.

    Raises:
        UsageError: a dtype that kernels do not have.
        CheckpointError: not a compressed checkpoint; no kernel configuration, or nonsense in it.
    """
    checkpoint = CompressedCheckpoint(folder)
    chosen = kernel_dtype(checkpoint.config.dtype, dtype)
    alike = Counter(zip(checkpoint.layouts, checkpoint.kernel_config.layers, strict=True))
    softcap = bool(getattr(checkpoint.config, "attn_logit_softcapping", None))
    return [
        Subject(layout_class(layout), count, layout, kernels, checkpoint.shape, chosen, 0, softcap)
        for (layout, kernels), count in alike.items()
    ]


NAMED_SHAPE = AttentionShape(1, 32, 8, 128, 4096, rotary_dim=128)


def named_layouts() -> dict[str, LayerLayout]:
    """Layouts that are counted without a checkpoint: heads of 128, 4 query heads a KV head, 8 KV heads."""

    def joint(places: int, heads: int, fast_planes: int) -> LayerLayout:
        groups = (GroupLayout((*range(i, i + heads),), Channels(n4=places), None) for i in range(0, 8, heads))
        return LayerLayout(tuple(groups), MOST_ROPE_BLOCK, fast_planes)

    def apart(latent: Channels | Numbers) -> LayerLayout:
        return LayerLayout(tuple(GroupLayout((head,), latent, latent) for head in range(8)))

    return {
        "joint-64-fast": joint(64, 1, 16),
        "joint-128-fast": joint(128, 1, 16),
        "joint-128x2-fast": joint(128, 2, 16),
        "joint-256x4-fast": joint(256, 4, 16),
        "joint-64": joint(64, 1, 0),
        "joint-128": joint(128, 1, 0),
        "apart-64": apart(Channels(n4=64)),
        "numbers-64": apart(Numbers(64)),
    }


def named_subjects() -> list[Subject]:
    """The named layouts, in pages of PAGE keys, bfloat16."""
    return [Subject(name, 1, x, default_layer(x), NAMED_SHAPE) for name, x in named_layouts().items()]


def count_layers(
    subjects: Sequence[Subject],
    archs: Sequence[int],
    devices: Mapping[int, Device],
    step: DecodeStep,
    *,
    dump: Path | None = None,
    progress: Progress | None = None,
) -> list[CountedLayer]:
    """Compile every kernel that layers need and count those of a decode step; Triton's cache keeps what comes out.

    Args:
        devices: by architecture, whose rates the limits are predicted by. step: the load.
        dump: folder for cubin, SASS and PTX of every kernel.
    Raises:
        UsageError: Triton is not installed.
    """
    if not triton_installed():
        raise UsageError("Triton, which compiles the kernels, is not installed.", pip_install("kernels"))
    from .specialise import layer_variants

    progress = progress or Progress()
    work = [
        (s, arch, layer_variants(s.layout, s.shape, s.kernels, s.dtype, arch, page=s.page, softcap=s.softcap))
        for arch in archs
        for s in subjects
    ]
    found = []
    with progress.task("compile", sum(len(variants) for *_, variants in work), "kernels") as advance:
        for subject, arch, variants in work:
            kernels = []
            for variant in variants:
                kernels.append(compile_kernel(variant, arch, subject.shape.num_kv_heads, dump))
                advance(1)
            found.append(_layer(subject, arch, tuple(kernels), devices.get(arch), step))
    return found


def compile_kernel(variant: Variant, arch: int, kv_heads: int, dump: Path | None = None) -> Kernel:
    """Compile and count one; of a kernel that fails, why: others must not be hidden by it.

    Args:
        kv_heads: of the layer.
    """
    from .ahead import compile_variant
    from .sass import CountError

    name, of_arch = variant.name, f"sm_{arch}"
    try:
        compiled = compile_variant(variant, arch)
    except Exception as error:  # the compiler has many
        return Kernel(name, of_arch, variant.warps, error=" ".join(f"{type(error).__name__}: {error}".split()))
    if dump is not None:
        _dump(dump / of_arch, name, compiled.cubin, compiled.sass(), compiled.ptx)
    takes = compiled.registers, compiled.spilled_bytes, compiled.shared_bytes
    if not variant.keys:
        return Kernel(name, of_arch, variant.warps, *takes)
    try:
        counted = compiled.count(variant)
    except CountError as error:
        return Kernel(name, of_arch, variant.warps, *takes, error=f"not counted: {error}")
    share = variant.warps * variant.groups / (variant.keys * kv_heads)
    by_pipe = {pipe: share * n for pipe, n in sorted(counted.pipes.items(), key=lambda item: -item[1])}
    return Kernel(name, of_arch, variant.warps, *takes, share * counted.instructions, by_pipe, counted.loops)


def _layer(
    subject: Subject, arch: int, kernels: tuple[Kernel, ...], device: Device | None, step: DecodeStep
) -> CountedLayer:
    by_pipe: Counter[str] = Counter()
    for kernel in kernels:
        by_pipe.update(kernel.by_pipe or {})
    known = not any(kernel.error for kernel in kernels)
    a_key = sum(by_pipe.values())
    size, heads = layer_bytes(subject.layout, subject.shape, subject.dtype.itemsize), subject.shape.num_kv_heads
    memory = issue = share = None
    if device is not None and known:
        time = LayerTime.of(step.keys * size, step.keys * heads * a_key, 0.0, device)
        memory, issue = device.read_seconds(time.cache_bytes), device.issue_seconds(time.instructions)
        share = time.attention_s / uncompressed_layer_time(subject.shape, device, step).attention_s
    return CountedLayer(
        layout=subject.name,
        arch=f"sm_{arch}",
        layers=subject.layers,
        instructions_per_key=a_key if known else None,
        spilled_bytes=max((kernel.spilled_bytes or 0 for kernel in kernels if kernel.by_pipe), default=0),
        by_pipe={pipe: round(float(n), 3) for pipe, n in by_pipe.most_common()},
        bytes_per_key=size / heads,
        memory_s=memory,
        issue_s=issue,
        share=share,
        kernels=kernels,
    )


def _dump(folder: Path, name: str, cubin: bytes, sass: str, ptx: str) -> None:
    """Raises UsageError if they cannot be written."""
    file = re.sub(r"[^\w.+-]+", "_", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{file}.cubin").write_bytes(cubin)
        (folder / f"{file}.sass").write_text(sass, "utf-8")
        (folder / f"{file}.ptx").write_text(ptx, "utf-8")
    except OSError as error:
        raise UsageError(f"--dump {folder}: {error}", "Give a folder that can be written.") from error


def count_specialisation(wanted: Specialisation, arch: int) -> Counts:
    """What the table of instructions has of a specialisation: of a layer of 8 KV heads, in pages.

    Raises:
        UsageError: a kernel cannot be compiled or counted.
    """
    from .specialise import layer_variants

    kind, width, rows, fast_planes, kv_heads, rope_block = wanted
    latent = Numbers(width) if "numbers" in kind else Channels(n4=width)
    joint = kind == "joint"
    groups = (
        GroupLayout(tuple(range(i, i + kv_heads)), latent, None if joint else latent) for i in range(0, 8, kv_heads)
    )
    layout = LayerLayout(tuple(groups), rope_block if joint else None, fast_planes)
    shape = AttentionShape(1, 8 * rows // kv_heads, 8, HEAD_DIM, 4096, rotary_dim=HEAD_DIM)
    found = {"decode": 0.0, "absorb": 0.0}
    spilled = 0
    for variant in layer_variants(layout, shape, default_layer(layout), torch.bfloat16, arch, page=PAGE):
        if not variant.keys:
            continue
        kernel = compile_kernel(variant, arch, kv_heads=8 // kv_heads)
        if kernel.error is not None or kernel.instructions_per_key is None or kernel.spilled_bytes is None:
            raise UsageError(
                f"{wanted}, {variant.name}: {kernel.error}", "`rotor compile OUT --dump DIR` keeps its machine code."
            )
        spilled = max(spilled, kernel.spilled_bytes)
        found["absorb" if variant.name.startswith("absorb") else "decode"] += kernel.instructions_per_key
    return Counts(round(found["decode"], 2), round(found["absorb"], 2), spilled)


def write_counts(path: Path, arch: int, progress: Progress | None = None) -> None:
    """Count every specialisation of the table of instructions, and write it.

    Raises:
        UsageError: Triton is not installed; a kernel cannot be counted; the file cannot be written.
    """
    if not triton_installed():
        raise UsageError("Triton, which compiles the kernels, is not installed.", pip_install("kernels"))
    import triton

    table, wanted = {}, grid()
    with (progress or Progress()).task("count", len(wanted), "sizes") as advance:
        for each in wanted:
            table[each] = count_specialisation(each, arch)
            advance(1)
    write_report(path, table_data(table, arch=f"sm_{arch}", triton=triton.__version__, page=PAGE))


def as_records(layers: Iterable[CountedLayer]) -> list[dict[str, Any]]:
    """In JSON's types."""
    return [asdict(layer) for layer in layers]


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
