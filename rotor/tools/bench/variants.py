"""Every kernel that a layer needs, as Triton compiles it: launches are recorded for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from ...checkpoint.layout import LayerLayout
from ...kernels.absorb_launch import Absorbing, block_starts
from ...kernels.append import append
from ...kernels.decode_launch import DecodeLayer, decode_attention
from ...kernels.exact_slots import ExactSlots, SlotsToFill
from ...kernels.expand import PagesOf, expand
from ...kernels.launch import AbsentGPU, absent
from ...kernels.parameters import AttentionParameters, row_dtype
from ...kernels.ranges import KeyRanges
from ...kernels.rotary import Rotation
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
def recorded(arch: int, sms: int = 2) -> Iterator[list[Variant]]:
    """List the kernels that are launched inside, on tensors of the CPU, in place of running them.

    Args:
        arch: compute capability of the GPU, 90 is 9.0. sms: its streaming multiprocessors, of which few are filled by
            each launch, and many by none of few sequences.
    """
    target, launched = GPUTarget("cuda", arch, 32), []

    def record(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        kind = fn.jit_function.__name__.removesuffix("_kernel")
        launched.append(Variant(kind, kind, source, options, target))
        return True  # not compiled

    active = driver._active
    current = {"device": lambda: f"recorded sm_{arch}", "stream": lambda device: 0, "target": lambda: target}
    driver.set_active(SimpleNamespace(**{f"get_current_{name}": call for name, call in current.items()}))
    try:
        with knobs.runtime.scope(), absent(AbsentGPU(arch, sms)):
            knobs.runtime.jit_cache_hook = record
            yield launched
    finally:
        driver._active = active


def layer_variants(subject: Subject, arch: int) -> list[Variant]:
    """The distinct kernels of a layer: of a step, and of a prompt."""
    layer = _Layer(subject, arch)
    layer.record_rows()
    if not subject.kernels.materialise:
        layer.record_steps()
    return list(layer.distinct.values())


class _Layer:
    """A layer whose kernels are recorded, once each; tensors hold nothing."""

    def __init__(self, subject: Subject, arch: int) -> None:
        self.subject, self.arch = subject, arch
        layout, shape, dtype = subject.layout, subject.shape, subject.dtype
        tensors = step_tensors(layout, shape, dtype, torch.zeros)
        read = ("query_basis", "key_constant", "output_basis", "value_constant")
        self.parameters = AttentionParameters(
            layout, shape, 1.0, softcap=1.0 if subject.softcap else None, **{name: tensors.get(name) for name in read}
        )
        self.rotation = None
        if shape.rotary_dim:
            cos, sin = torch.zeros(2, 4 * (layout.rope_block or 64), shape.rotary_dim)
            self.rotation = cos, sin
        unit, kind, self.keys = layout.element_bytes(dtype.itemsize), row_dtype(layout, dtype), subject.page or 64
        widths = (count // unit for count in layout.read_bytes(dtype.itemsize))
        self.key, self.value = (torch.zeros(1, self.keys, width, dtype=kind) for width in widths)
        self.block_table = torch.zeros(1, 4, dtype=torch.int32) if subject.page else None
        self.distinct: dict[object, Variant] = {}

    def keep(self, variants: list[Variant], name: str, of_step: DecodeLayer | None = None) -> None:
        for variant in variants:
            named = replace(variant, name=name.format(variant.kind), of_step=of_step)
            self.distinct.setdefault((variant.source.hash(), str(variant.options)), named)

    def record_rows(self) -> None:
        """Record what makes rows, and expands those of a prompt."""
        subject, layout, pages = self.subject, self.subject.layout, None
        for tokens in (1, 4096):
            with recorded(self.arch) as launched:
                _append(subject, tokens, self.rotation, (self.key, self.value) if subject.page else None)
            self.keep(launched, f"{{}}, {tokens} tokens")
        if self.block_table is not None:
            pages = PagesOf(self.block_table, torch.ones(1).int(), torch.zeros(2).int(), 64, 64)
        for cls in layout.classes(subject.dtype.itemsize):
            with recorded(self.arch) as launched:
                expand(self.key, self.value, self.parameters, cls, subject.dtype, self.rotation, pages=pages)
            self.keep(launched, f"{{}} {cls.key.width}+{cls.value.width}x{layout.group_size}")

    def record_steps(self) -> None:
        """Record steps of many sequences and of few, which launch other programs, and behind masks; pages have none."""
        every = KeyRanges.of_lengths(torch.ones(1).int())
        behind_mask = KeyRanges.of_mask(torch.ones(1, 1, self.keys, dtype=torch.bool))
        self._record_step(every, FEW_SMS, counted=True)
        self._record_step(every, MANY_SMS, ", few sequences")
        if not self.subject.page:
            self._record_step(behind_mask, FEW_SMS, ", a mask")
            self._record_step(behind_mask, MANY_SMS, ", a mask, few sequences")

    def _record_step(self, ranges: KeyRanges, sms: int, of: str = "", counted: bool = False) -> None:
        subject, layout, shape = self.subject, self.subject.layout, self.subject.shape
        query = torch.zeros(1, shape.num_heads, shape.head_dim, dtype=subject.dtype)
        starts = exact = absorbing = None
        if self.rotation is not None and layout.in_blocks:
            starts = block_starts(self.rotation, layout)
        if layout.exact is not None:
            exact = random_slots(layout.exact, shape, 1, 1, subject.dtype, torch.Generator())
        if exact is not None and self.block_table is not None:
            pages = torch.zeros(1, shape.num_kv_heads, subject.page, shape.head_dim, dtype=subject.dtype)
            exact = replace(exact, key=pages, value=pages, block_table=self.block_table)
        with recorded(self.arch, sms) as launched:
            layer = DecodeLayer(self.parameters, subject.dtype, CPU)
            if layer.folded:
                query = torch.zeros(1, layer.group_rows * layout.key_width, dtype=subject.dtype)
            decode_attention(
                query, self.key, self.value, layer, ranges, starts, block_table=self.block_table,
                tiles=subject.kernels.tile(self.arch), exact=exact, attended=ranges,
            )  # fmt: skip
        widths = f"{layer.operands * layer.columns}+{layer.operands * layer.value_columns}x{layer.heads}"
        self.keep(launched, f"{{}} {widths}, T {layer.block}{of}", layer if counted else None)
        if subject.page:
            return
        # In a cache of transformers one launch makes the row of a step's token, absorbs its query, and stores it.
        if starts is not None and not layer.folded:
            absorbing = Absorbing.of(layer, ranges, slice(0, 1), 1, starts)
        for fill in _slots_to_fill(layout, exact):
            with recorded(self.arch, sms) as launched:
                _append(subject, 1, self.rotation, None, fill, absorbing)
            self.keep(launched, "{}, a step")


FEW_SMS, MANY_SMS = 2, 1 << 10
"""Of GPUs that a step of one sequence fills, and does not."""


def _append(
    subject: Subject,
    tokens: int,
    rotation: Rotation | None,
    pages: tuple[torch.Tensor, torch.Tensor] | None,
    fill: SlotsToFill | None = None,
    absorbing: Absorbing | None = None,
) -> None:
    layout, shape, dtype = subject.layout, subject.shape, subject.dtype
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
        fill=fill,
        absorb=absorbing,
        **{name: stored.get(name) for name in basis_names},
    )


def _slots_to_fill(layout: LayerLayout, exact: ExactSlots | None) -> list[SlotsToFill | None]:
    """Slots of caches that grow and of static ones, which count on the device; behind padding, whose end lies there."""
    if layout.exact is None or exact is None:
        return [None]
    slots = exact.key, exact.value, layout.exact.first, layout.exact.newest
    offsets, begins = (0, torch.zeros((), dtype=torch.int64)), (0, torch.zeros(1, dtype=torch.int64))
    return [SlotsToFill(*slots, offset, begin) for offset, begin in product(offsets, begins)]
