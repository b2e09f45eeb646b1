"""How many programs of a kernel an SM holds at a time, by registers, shared memory, warps and slots: arithmetic."""

from __future__ import annotations

from .gpu import SHARED_KB
from .schedule import REGISTERS_PER_SM

WARPS = {70: 64, 75: 32, 80: 64, 86: 48, 87: 48, 89: 48, 90: 64, 100: 64, 103: 64, 110: 48, 120: 48, 121: 48}
PROGRAMS = {70: 32, 75: 16, 80: 32, 86: 16, 87: 16, 89: 24, 90: 32, 100: 32, 103: 32, 110: 24, 120: 24, 121: 24}
"""Warps and programs that an SM holds at most, by compute capability. Source: CUDA programming guide, technical
specifications per compute capability."""

RESERVED_BYTES = 1 << 10
"""Of shared memory, that the system takes for each program from 8.0 on; an SM has so much more than one program may
have."""

ALLOCATED_REGISTERS = 256
"""Registers are given to a warp in multiples of so many."""

MOST_REGISTERS = 255
"""That a thread may have."""

GRID_PROGRAMS = 2
"""Programs for each SM that a decode step is launched with, where nothing else is asked for."""


def programs_per_sm(warps: int, shared_bytes: int, capability: int, registers: int | None = None) -> int:
    """Programs of a kernel that an SM of a compute capability (90 is 9.0) holds at a time.

    Args:
        warps: of a program. shared_bytes: of a program.
        registers: of a thread; None takes the most that there are, which bounds the count from below.
    Returns:
        0 where a single one does not fit.
    Source: CUDA programming guide, technical specifications; CUDA's occupancy calculator.
    """
    known = capability if capability in WARPS else 90
    reserved = RESERVED_BYTES if known >= 80 else 0
    of_warp = -(-32 * (registers or MOST_REGISTERS) // ALLOCATED_REGISTERS) * ALLOCATED_REGISTERS
    by_registers = REGISTERS_PER_SM // (of_warp * warps)
    by_shared = (SHARED_KB[known] * 1024 + reserved) // max(1, shared_bytes + reserved)
    return min(by_registers, by_shared, WARPS[known] // warps, PROGRAMS[known])
