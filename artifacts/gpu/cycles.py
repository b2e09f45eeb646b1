"""Cycles for which a kernel's instructions keep each part of an SM busy: which of its limits the count of them hides.

An SM has four partitions, each with a scheduler and pipes of its own, and one path to its shared memory and L1 cache,
128 bytes wide. How long a warp's instruction takes of a pipe is known by its opcode. So each pipe gives a bound from
below, and so do the cycles that the compiler makes a warp wait between two instructions, shared by the warps of a
partition. The time of a kernel is no less than the largest; what is not known is how much of them overlaps, and bank
conflicts, and waiting for memory.

Rates: CUDA C++ Programming Guide, arithmetic instructions; 128 bytes a cycle of shared memory; tensor cores by the data
sheets' peaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .sass import Graph, Instruction, Loop

PARTITIONS = 4

REGISTERS = 16384
"""Registers of a partition."""

MOST_WARPS = 16
"""The most warps on a partition."""

SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
"""Shared memory for an SM's programs, each of which takes a kilobyte more than it asks for."""

PATH = "shared memory"

PATH_BYTES = 128
"""Bytes that the path to shared memory and L1 moves in a cycle."""

FLOAT_CYCLES = {80: 2.0, 90: 1.0}
"""Cycles of a partition's float32 pipe for a warp's instruction."""

TENSOR_PRODUCTS = {80: 256.0, 90: 512.0}
"""Multiply-adds of 16-bit numbers of a partition's tensor core in a cycle."""

OF_HMMA = {80: 1.0, 90: 0.62}
"""Share of that which products of single warps (`mma.sync`, HMMA) reach: Hopper's as others report it, arXiv
2402.13499."""

Weight = Callable[[Instruction], float]

FLOATS = {"FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"}
STORES_AND_LOADS = {"LDS", "STS", "LDG", "STG", "LDL", "STL", "LDGSTS", "LD", "ST", "ATOMS", "ATOMG", "RED"}
NO_PIPE = {"NOP", "BRA", "EXIT", "RET", "CALL", "BSYNC", "BSSY", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "BAR", "WARPGROUP"}
"""Opcodes that only take a slot of the scheduler, or memory that is none of the others'."""

MATRICES = {"LDSM": 128, "STSM": 128}
"""Bytes of a matrix of 8 by 8 numbers of 16 bits."""


def shared_bytes(instruction: Instruction) -> float:
    """Bytes of a warp's instruction on the path to shared memory and L1; numbers of 32 bits where nothing is said."""
    parts, base = instruction.opcode.split("."), instruction.base
    if base in MATRICES:
        return MATRICES[base] * float(parts[-1] if parts[-1] in ("2", "4") else 1)
    if base == "SHFL":
        return 128.0
    if base == "HGMMA":  # one operand for the four warps of a group, or both
        m, n, k = _sizes(instruction)
        operands = len(re.findall(r"gdesc", instruction.operands))
        return 2.0 * (n * k + (m * k if operands > 1 else 0)) / 4
    if base not in STORES_AND_LOADS:
        return 0.0
    wide = next((int(part) for part in parts[1:] if part in ("64", "128")), 32)
    return 32 * wide / 8


def _sizes(instruction: Instruction) -> tuple[int, int, int]:
    """m, n, k of a matrix product: HMMA.16816 or HGMMA.64x16x16."""
    size = instruction.opcode.split(".")[1]
    if "x" in size:
        m, n, k = map(int, size.split("x"))
        return m, n, k
    return int(size[:2]), int(size[2]), int(size[3:])


def weights(arch: int) -> dict[str, Weight]:
    """Cycles of each pipe, by its name, for a warp's instruction; of a whole SM.

    `integer` is everything that has no other pipe: integers, comparisons, conversions.
    """

    def tensor(x: Instruction) -> float:
        if x.base not in ("HMMA", "HGMMA"):
            return 0.0
        m, n, k = _sizes(x)
        rows = m / 4 if x.base == "HGMMA" else m  # of one of the four warps
        slower = 2.0 if "TF32" in x.opcode else 1.0
        return slower * rows * n * k / TENSOR_PRODUCTS[arch] / (OF_HMMA[arch] if x.base == "HMMA" else 1.0)

    def of_float(x: Instruction) -> float:
        return FLOAT_CYCLES[arch] if x.base in FLOATS else 2.0 if x.base == "IMAD" else 0.0

    def special(x: Instruction) -> float:
        return 8.0 if x.base == "MUFU" else 0.0

    def integer(x: Instruction) -> float:
        none = x.base in NO_PIPE or x.base.startswith("U") or shared_bytes(x) or tensor(x) or of_float(x) or special(x)
        return 0.0 if none else 2.0

    def shared(of: Weight) -> Weight:  # by the partitions
        return lambda x: of(x) / PARTITIONS

    return {
        "issue": shared(lambda _: 1.0),
        PATH: lambda x: shared_bytes(x) / PATH_BYTES,
        "float": shared(of_float),
        "integer": shared(integer),
        "special": shared(special),
        "tensor": shared(tensor),
    }


def resident_warps(arch: int, registers: int, shared: int, warps: int, launched: int | None = None) -> int:
    """Warps of a kernel that an SM holds at a time, by what a thread and a program take, and programs launched."""
    in_partition = min(MOST_WARPS, REGISTERS // (-(-registers // 8) * 8 * 32))
    programs = min(PARTITIONS * in_partition // warps, SHARED_BYTES[arch] // (shared + 1024))
    return max(1, programs if launched is None else min(programs, launched)) * warps


def busy(graph: Graph, loops: Sequence[Loop], arch: int, resident: int) -> dict[str, float]:
    """Cycles of an SM that one warp takes of each pipe from its start to its end, and, where `resident` warps wait at a
    time, of what the compiler has it wait. Empty for architectures whose rates are not known here.
    """
    if arch not in FLOAT_CYCLES:
        return {}
    found = {name: graph.count(loops, weight) for name, weight in weights(arch).items()}
    found["waiting"] = graph.count(loops, lambda x: float(max(1, x.stall))) / resident
    return found
