"""Compiling kernels without a GPU, and what the compiler says of them: registers, spills, copies."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}

ALL_CONSTANTS = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 7)
"""Whether the launcher gives all constants empty attributes, or only strings: they are part of its key in the cache."""


@dataclass(frozen=True)
class Variant:
    """One kernel with constants: what Triton compiles.

    pointers: argument -> dtype of the tensor; reals: float32 arguments; all other arguments that are no constants are
    32-bit integers. Pointers are taken to be aligned to 16 bytes, as PyTorch's own are.
    """

    name: str
    kernel: Any
    pointers: dict[str, torch.dtype]
    constants: dict[str, Any]
    reals: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Resources:
    """What a compiled variant takes and how it loads.

    registers: per thread. spill_bytes: of local memory per thread. shared_bytes: per program.
    async_copies, scalar_loads: instructions in the PTX; scalar ones load 16 bits.
    async_bytes: the kernel's arguments from which asynchronous copies read, with the fewest bytes that a thread copies
        at once.
    flight_bytes: the arguments from which a pipelined loop reads, with the bytes of them that a program has asked for
        when the loop begins, and thereafter while it computes; of several loops the fewest.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    async_copies: int
    scalar_loads: int
    matrix_products: int
    async_bytes: dict[str, int]
    flight_bytes: dict[str, int]


def compile_variant(variant: Variant, capability: int) -> Resources:
    """Compile for an NVIDIA GPU of compute capability 80, 90, ...; no GPU is needed."""
    compiled = triton.compile(variant.source(), target=GPUTarget("cuda", capability, 32), options=variant.options)
    registers, spill_bytes = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    copies = async_copies(compiled.asm["ttgir"])
    return Resources(
        registers,
        spill_bytes,
        int(compiled.metadata.shared),
        len(re.findall(r"cp\.async\.c[ag]|cp\.async\.bulk", ptx)),
        len(re.findall(r"ld\.global[.\w:]*\.[bus]16\s", ptx)),
        len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma\.", ptx)),
        smallest_copies(copies),
        bytes_in_flight(compiled.asm["ttgir"], copies),
    )


@dataclass(frozen=True)
class AsyncCopy:
    """One in Triton's own representation: its line there, the kernel's argument that it reads, the bytes that a thread
    copies at once, and those of the whole.
    """

    line: int
    argument: str
    thread_bytes: int
    tile_bytes: int


COPY = re.compile(
    r"ttg\.async_copy_global_to_local (%[\w.]+),[^\n]*?(?:contiguity = (\d+)[^\n]*?)? : "
    r"tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>"
)


def async_copies(ttgir: str) -> list[AsyncCopy]:
    """The asynchronous copies of a kernel, their pointers traced back to its arguments.

    The pointer is the first operand of all that pointers pass through; a loop's has the one that it begins with.
    """
    origins = dict(re.findall(r"^\s*(%[\w.]+) = [\w.]+ (%[\w.#]+)", ttgir, re.MULTILINE))
    for loop in re.findall(r"iter_args\((.*?)\) ->", ttgir):
        origins |= dict(re.findall(r"(%[\w.]+) = (%[\w.#]+)", loop))
    found = []
    for number, line in enumerate(ttgir.splitlines()):
        for pointer, contiguity, sizes, bits in COPY.findall(line):
            while pointer in origins:
                pointer = origins[pointer]
            elements = math.prod(int(size) for size in sizes.split("x"))
            thread_bytes = int(contiguity or 1) * int(bits) // 8
            found.append(AsyncCopy(number, pointer[1:], thread_bytes, elements * int(bits) // 8))
    return found


def smallest_copies(copies: list[AsyncCopy]) -> dict[str, int]:
    """Of each argument the fewest bytes that a thread copies at once."""
    smallest: dict[str, int] = {}
    for copy in copies:
        smallest[copy.argument] = min(copy.thread_bytes, smallest.get(copy.argument, copy.thread_bytes))
    return smallest


def bytes_in_flight(ttgir: str, copies: list[AsyncCopy]) -> dict[str, int]:
    """Of each argument what a pipelined loop keeps in flight: what is copied before it, in the block that holds it.

    The loop then waits for the oldest of these copies, and asks for as much before it computes.
    """
    by_line = {copy.line: copy for copy in copies}
    least: dict[str, int] = {}
    asked: list[dict[str, int]] = [{}]  # by argument, since the last loop, in every block that is open
    loops: list[tuple[dict[str, int], set[str]] | None] = [None]
    for number, line in enumerate(ttgir.splitlines()):
        text = line.strip()
        if text.startswith("}"):
            closed = loops.pop()
            asked.pop()
            if closed is not None:
                before, inside = closed
                for argument in inside & before.keys():
                    least[argument] = min(before[argument], least.get(argument, before[argument]))
        if number in by_line:
            copy = by_line[number]
            asked[-1][copy.argument] = asked[-1].get(copy.argument, 0) + copy.tile_bytes
            if loops[-1] is not None:
                loops[-1][1].add(copy.argument)
        if text.partition(" loc(")[0].rstrip().endswith("{"):
            is_loop = "scf.for" in text
            loops.append((asked[-1], set()) if is_loop else None)
            asked.append({})
            if is_loop:
                asked[-2] = {}  # a later loop begins with copies of its own
    return least


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread, as the disassembler that comes with Triton reports them."""
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return int(found[1]), int(found[2])
