"""Compiling kernels without a GPU: a kernel with its constants, as a launch would have it compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rotor.format.kernel_config import KernelConfig
from rotor.format.layout import AttentionShape, LayerLayout

from .sass import Loop

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
}

ALL_CONSTANTS = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 7)
"""Whether the launcher gives all constants empty attributes, or only strings: they are part of its key in the cache."""


@dataclass(frozen=True)
class Variant:
    """One kernel with constants: what Triton compiles.

    pointers: argument -> dtype of the tensor; reals: float32 arguments; all other arguments that are no constants are
    32-bit integers. Pointers are taken to be aligned to 16 bytes, as PyTorch's own are.
    loops: of its machine code, for counting instructions; empty where nobody counts them.
    """

    name: str
    kernel: Any
    pointers: dict[str, torch.dtype]
    constants: dict[str, Any]
    reals: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()

    def source(self) -> ASTSource:
        """What the launcher would compile for such arguments."""
        signature = {}
        for name in self.kernel.arg_names:
            if name in self.constants:
                signature[name] = "constexpr"
            elif name in self.pointers:
                signature[name] = "*" + TYPES[self.pointers[name]]
            else:
                signature[name] = "fp32" if name in self.reals else "i32"
        attributes: dict[tuple[int], list[Any]] = {}
        for i, name in enumerate(self.kernel.arg_names):
            if name in self.pointers:
                attributes[(i,)] = [["tt.divisibility", 16]]
            elif name in self.constants and (ALL_CONSTANTS or isinstance(self.constants[name], str)):
                attributes[(i,)] = []
        return ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants, attrs=attributes)

    def compile(self, capability: int) -> Any:
        """For an NVIDIA GPU of compute capability 80, 90, ...; no GPU is needed. `asm` of it has cubin and PTX."""
        return triton.compile(self.source(), target=GPUTarget("cuda", capability, 32), options=self.options)


def layer_variants(
    layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, *, tokens: int = 1, pages: bool = False
) -> list[Variant]:
    """What a layer takes beside decoding: append and materialise, for a step of so many tokens."""
    from .append import append_variant
    from .materialise import materialise_variants

    return [append_variant(layout, shape, dtype, tokens, pages), *materialise_variants(layout, shape, dtype, pages)]


def model_variants(
    config: KernelConfig, layouts: Sequence[LayerLayout], shape: AttentionShape, dtype: torch.dtype, **options: Any
) -> list[Variant]:
    """The distinct variants of a model; options as of `layer_variants`."""
    found = [v for layout in dict.fromkeys(layouts) for v in layer_variants(layout, shape, dtype, **options)]
    distinct = {(v.name, tuple(sorted(v.constants.items(), key=lambda item: item[0]))): v for v in found}
    return list(distinct.values())
