"""Compiling kernels without a GPU, and what they take: registers, what is spilled, instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .sass import Counted, Graph, Loop, disassemble, usage

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
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
    loops: of the kernel, with their trips in a program. keys: of one group, whose work in a decode step the program
        then does (of half a group's work, half of them); 0: a kernel whose work is not by keys. groups: of the layer,
        that the launch serves.
    """

    name: str
    kernel: Any
    pointers: dict[str, torch.dtype]
    constants: dict[str, Any]
    reals: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()
    keys: float = 0.0
    groups: int = 1

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

    @property
    def warps(self) -> int:
        return int(self.options.get("num_warps", 4))  # Triton's own default

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells variants apart."""
        return self.name, tuple(sorted(self.constants.items())), tuple(sorted(self.options.items()))


@dataclass(frozen=True)
class CompiledVariant:
    """What a compiled variant takes.

    registers, spilled_bytes: of a thread. shared_bytes: of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    cubin: bytes
    ptx: str

    def sass(self) -> str:
        """Its machine code, disassembled."""
        return disassemble(self.cubin)

    def count(self, variant: Variant) -> Counted:
        """Instructions of one warp; raises CountError where its loops are not the variant's."""
        return Graph(self.sass()).count(variant.loops)


def compile_variant(variant: Variant, capability: int) -> CompiledVariant:
    """Compile for an NVIDIA GPU of compute capability 80, 90, ...; no GPU is needed."""
    compiled = triton.compile(variant.source(), target=GPUTarget("cuda", capability, 32), options=variant.options)
    cubin = compiled.asm["cubin"]
    registers, spilled_bytes = usage(cubin)
    return CompiledVariant(registers, spilled_bytes, int(compiled.metadata.shared), cubin, compiled.asm["ptx"])
