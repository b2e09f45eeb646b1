"""Every kernel that a layer needs, as Triton compiles it: launches are recorded for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from ...checkpoint.layout import AttentionShape, LayerLayout
from ...kernels.absorb_launch import block_starts
from ...kernels.append import append
from ...kernels.decode_launch import DecodeLayer, decode_attention
from ...kernels.expand import PagesOf, expand
from ...kernels.parameters import AttentionParameters, row_dtype
from ...kernels.ranges import KeyRanges
from .attention import random_slots, step_tensors, zero_scale
from .precompile import Subject

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """One kernel with constants and options, for one GPU.

    kind: name of its function. of_step: the layer of the decode step that launches it, None outside of a step.
    """

    name: str
    kind: str
    source: ASTSource
    options: dict[str, int]
    target: GPUTarget
    of_step: DecodeLayer | None = None

    @property
    def warps(self) -> int:
        return int(self.options["num_warps"])

    def compile(self) -> CompiledKernel:
        """Triton's compiled kernel, which its own cache keeps; no GPU is needed."""
        return triton.compile(self.source, target=self.target, options=self.options)


@contextmanager
def recorded(arch: int) -> Iterator[list[Variant]]:
    """List the kernels that are launched inside, on tensors of the CPU, in place of running them.

    Args:
        arch: compute capability of the GPU, 90 is 9.0.
    """
    target, launched = GPUTarget("cuda", arch, 32), []

    def record(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        kind = fn.jit_function.__name__.removesuffix("_kernel")
        launched.append(Variant(kind, kind, source, options, target))
        return True  # not compiled

    active = driver._active
    absent = {"device": lambda: f"recorded sm_{arch}", "stream": lambda device: 0, "target": lambda: target}
    driver.set_active(SimpleNamespace(**{f"get_current_{name}": call for name, call in absent.items()}))
    try:
        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = record
            yield launched
    finally:
        driver._active = active


def layer_variants(subject: Subject, arch: int) -> list[Variant]:
    """The distinct kernels of a layer: of a step, and of a prompt."""
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
    distinct: dict[object, Variant] = {}

    def keep(variants: list[Variant], name: str, of_step: DecodeLayer | None = None) -> None:
        for variant in variants:
            named = replace(variant, name=name.format(variant.kind), of_step=of_step)
            distinct.setdefault((variant.source.hash(), str(variant.options)), named)

    for tokens in (1, 4096):
        with recorded(arch) as launched:
            _append(layout, shape, dtype, tokens, rotation, (key, value) if page else None)
        keep(launched, f"{{}}, {tokens} tokens")
    pages = PagesOf(block_table, torch.ones(1).int(), torch.zeros(2).int(), 64, 64) if block_table is not None else None
    for cls in layout.classes(dtype.itemsize):
        with recorded(arch) as launched:
            expand(key, value, parameters, cls, dtype, rotation, pages=pages)
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
        keep(launched, name, layer)
    return list(distinct.values())


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
