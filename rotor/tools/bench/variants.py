"""Every kernel that a layer needs, as Triton compiles it: launches are recorded for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from ...checkpoint.kernel_config import LayerKernels
from ...checkpoint.layout import AttentionShape, LayerLayout
from ...kernels.append import append
from ...kernels.decode import MOVES
from ...kernels.decoding import DecodeLayer, absorbing_programs, block_starts, decode_attention, finish_constants
from ...kernels.materialise import PagesOf, materialise
from ...kernels.parameters import AttentionParameters
from ...kernels.ranges import KeyRanges
from ...kernels.rows import row_dtype
from .attention import random_slots, step_tensors, zero_scale
from .sass import Loop
from .subjects import STEP, Subject

SMS = 132
"""SMs of the GPU that loops' trips are stated for."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """One kernel with constants and options, for one GPU.

    loops: of the kernel, with their trips in a program. keys: of one group, whose work in a decode step the program
        does (of half a group's work, half of them); 0: a kernel whose work is not by keys. groups: of the layer, that
        the launch serves. programs: launched for an SM; None: as many as it holds.
    """

    name: str
    source: ASTSource
    options: dict[str, int]
    target: GPUTarget
    loops: tuple[Loop, ...] = ()
    keys: float = 0.0
    groups: int = 1
    programs: int | None = None

    @property
    def warps(self) -> int:
        return int(self.options["num_warps"])

    def compile(self) -> CompiledKernel:
        """Triton's compiled kernel, which its own cache keeps; no GPU is needed."""
        return triton.compile(self.source, target=self.target, options=self.options)


class Work(TypedDict, total=False):
    """Fields of a Variant that say what its programs do in a step."""

    loops: tuple[Loop, ...]
    keys: float
    groups: int
    programs: int


@contextmanager
def recorded(arch: int) -> Iterator[list[Variant]]:
    """Kernels launched inside, on tensors of the CPU, are listed in place of being run; each is named by its function.

    Args:
        arch: compute capability of the GPU, 90 is 9.0.
    """
    target, found = GPUTarget("cuda", arch, 32), []

    def record(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        found.append(Variant(fn.jit_function.__name__, source, options, target))
        return True  # not compiled

    active = driver._active
    absent = {"device": lambda: f"recorded sm_{arch}", "stream": lambda device: 0, "target": lambda: target}
    driver.set_active(SimpleNamespace(**{f"get_current_{name}": call for name, call in absent.items()}))
    try:
        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = record
            yield found
    finally:
        driver._active = active


def layer_variants(subject: Subject, arch: int) -> list[Variant]:
    """The distinct kernels of a layer: of a step, and of a prompt, with the trips of their loops in a step."""
    layout, shape, kernels, dtype, page = subject.layout, subject.shape, subject.kernels, subject.dtype, subject.page
    tensors = step_tensors(layout, shape, dtype, torch.zeros)
    read = ("query_basis", "key_constant", "output_basis", "value_constant")
    parameters = AttentionParameters(
        layout, shape, 1.0, softcap=1.0 if subject.softcap else None, **{name: tensors.get(name) for name in read}
    )
    rotation = None
    if shape.rotary_dim:
        cos, sin = torch.zeros(2, 4 * (layout.rope_block or 64), shape.rotary_dim)
        rotation = cos, sin
    unit, kind = layout.element_bytes(dtype.itemsize), row_dtype(layout, dtype)
    size = page or 64
    key, value = (torch.zeros(1, size, count // unit, dtype=kind) for count in layout.read_bytes(dtype.itemsize))
    block_table = torch.zeros(1, 4, dtype=torch.int32) if page else None
    found: dict[object, Variant] = {}

    def keep(variants: list[Variant], name: str, work: dict[str, Work] | None = None) -> None:
        for variant in variants:
            kind = variant.name.removesuffix("_kernel")
            found.setdefault(
                (variant.source.hash(), str(variant.options)),
                replace(variant, name=name.format(kind), **({} if work is None else work[kind])),
            )

    for tokens in (1, 4096):
        with recorded(arch) as launched:
            _append(layout, shape, dtype, tokens, rotation, (key, value) if page else None)
        keep(launched, f"{{}}, {tokens} tokens")
    pages = PagesOf(block_table, torch.ones(1).int(), torch.zeros(2).int(), 64, 64) if block_table is not None else None
    for cls in layout.classes(dtype.itemsize):
        with recorded(arch) as launched:
            materialise(key, value, parameters, cls, dtype, rotation, pages=pages)
        keep(launched, f"{{}} {cls.key.width}+{cls.value.width}x{layout.group_size}")
    if not kernels.materialise:
        layer = DecodeLayer(parameters, dtype, CPU)
        query = torch.zeros(1, shape.num_heads, shape.head_dim, dtype=dtype)
        if layer.folded:
            query = torch.zeros(1, layer.group_rows * layout.key_width, dtype=dtype)
        starts = block_starts(rotation, layout) if rotation and layout.in_blocks else None
        ranges, exact = KeyRanges.of_lengths(torch.ones(1).int()), None
        if layout.exact is not None:
            exact = random_slots(layout.exact, shape, 1, 1, dtype, torch.Generator())
        with recorded(arch) as launched:
            decode_attention(
                query, key, value, layer, ranges, starts, block_table=block_table, tiles=kernels.tile(arch),
                exact=exact, attended=ranges,
            )  # fmt: skip
        widths = f"{layer.operands * layer.columns}+{layer.operands * layer.value_columns}"
        name = f"{{}} {widths}x{layer.heads}, T {layer.block}"
        keep(launched, name, _work_of_a_step(layer, kernels, arch))
    return list(found.values())


def _append(
    layout: LayerLayout,
    shape: AttentionShape,
    dtype: torch.dtype,
    tokens: int,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    pages: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    places = torch.zeros(tokens, dtype=torch.int64)
    stored = step_tensors(layout, shape, dtype, torch.zeros)
    heads = (1, tokens, shape.num_kv_heads, shape.head_dim)
    key = (1, tokens, layout.key_rank) if layout.folds_keys(shape) else heads
    value = torch.zeros((1, tokens, layout.value_rank) if layout.folds_values else heads, dtype=dtype)
    basis_names = ("key_basis", "key_shift", "value_basis", "value_shift")
    append(
        torch.zeros(key, dtype=dtype),
        value,
        layout,
        shape,
        query=torch.zeros(1, tokens, shape.num_heads, shape.head_dim, dtype=dtype) if rotation else None,
        scale=zero_scale(layout, CPU),
        rotation=rotation,
        index=places if rotation else None,
        out=pages,
        slots=None if pages is None else places,
        **{name: stored.get(name) for name in basis_names},
    )


def _work_of_a_step(layer: DecodeLayer, kernels: LayerKernels, arch: int) -> dict[str, Work]:
    """Loops of each kernel of a decode step of one token a sequence, and the keys that a program serves."""
    length, sequences = STEP.context_tokens, STEP.batch_size
    groups, step = len(layer.layout.groups), layer.step(kernels.tile(arch))
    queries = groups * layer.group_rows * sequences
    blocks, warps, _ = layer.absorb_shape(many=True)
    chunks = -(-(length // layer.block if layer.block else 1) // blocks)
    programs = absorbing_programs(chunks, queries * warps, SMS)
    tiles = sequences * groups * length / step / (SMS * kernels.slices_per_sm)
    parts = 1 + tiles * step / length
    loops = Loop(1), Loop(parts, (Loop(1), Loop(tiles / parts, longer=1 / MOVES)))
    return {
        "absorb": {"loops": (Loop(chunks / programs),), "keys": length / programs / layer.group_rows, "groups": groups},
        "decode": {"loops": loops, "keys": tiles * step, "groups": groups, "programs": kernels.slices_per_sm},
        "join": {"loops": (Loop(1),) * 3, "keys": length / layer.group_rows, "groups": groups},
        "finish": _work_of_finishing(layer, kernels, arch, tiles * step),
    }


def _work_of_finishing(layer: DecodeLayer, kernels: LayerKernels, arch: int, slice_keys: float) -> Work:
    """Loops of the finish kernel in a decode step, and the keys that a program serves.

    Args:
        slice_keys: keys of one group that a slice of decoding has.
    """
    exact = layer.layout.exact
    if exact is None:
        return {}
    length, share = STEP.context_tokens, layer.per_head  # the sequences of the step fill the GPU
    constants = finish_constants(layer, 1, kernels.tile(arch), share, False)
    joined = -(-(length / slice_keys + 1) // constants["SLICES"])
    columns = -(-layer.operands * layer.value_columns // constants["COLUMNS"])
    once = columns == 1 and layer.value_exact  # known when it is compiled: no loop
    of_columns = Loop(joined) if once else Loop(columns, (Loop(joined),))
    loops = Loop(-(-exact.slots // constants["KEYS"])), *(Loop(1),) * 2, Loop(joined), of_columns
    return {"loops": loops, "keys": length * share / layer.group_rows, "groups": len(layer.layout.groups)}
