"""The work of a decode step's kernels: loops with their trips, and the keys that a program serves."""

from __future__ import annotations

from dataclasses import dataclass

from rotor.checkpoint.kernel_config import LayerKernels
from rotor.kernels.absorb_launch import absorbing_programs
from rotor.kernels.decode import MOVES
from rotor.kernels.decode_launch import DecodeLayer, finish_constants
from rotor.tools.bench.variants import Variant

from .sass import Loop
from .subjects import STEP

SMS = 132
"""SMs of the GPU that loops' trips are stated for."""


@dataclass(frozen=True)
class Work:
    """Work of one program of a launch.

    loops: of the kernel, with their trips in a program. keys: of one group, whose work in a decode step the program
        does (of half a group's work, half of them); 0: a kernel whose work is not by keys. groups: of the layer, that
        the launch serves. programs: launched for an SM; None: as many as it holds.
    """

    loops: tuple[Loop, ...] = ()
    keys: float = 0.0
    groups: int = 1
    programs: int | None = None


def work_of(variant: Variant, kernels: LayerKernels, arch: int) -> Work:
    """Work of a kernel in a decode step of one token a sequence; none of one that no step launches."""
    if variant.of_step is None:
        return Work()
    return _work_of_a_step(variant.of_step, kernels, arch)[variant.kind]


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
        "absorb": Work((Loop(chunks / programs),), length / programs / layer.group_rows, groups),
        "decode": Work(loops, tiles * step, groups, kernels.slices_per_sm),
        "join": Work((Loop(1),) * 3, length / layer.group_rows, groups),
        "finish": _work_of_finishing(layer, kernels, arch, tiles * step),
    }


def _work_of_finishing(layer: DecodeLayer, kernels: LayerKernels, arch: int, slice_keys: float) -> Work:
    """Loops of the finish kernel in a decode step, and the keys that a program serves.

    Args:
        slice_keys: keys of one group that a slice of decoding has.
    """
    exact = layer.layout.exact
    if exact is None:
        return Work()
    length, share = STEP.context_tokens, layer.per_head  # the sequences of the step fill the GPU
    constants = finish_constants(layer, 1, kernels.tile(arch), share, False)
    joined = -(-(length / slice_keys + 1) // constants["SLICES"])
    columns = -(-layer.operands * layer.value_columns // constants["COLUMNS"])
    once = columns == 1 and layer.value_full  # known when it is compiled: no loop
    of_columns = Loop(joined) if once else Loop(columns, (Loop(joined),))
    loops = Loop(-(-exact.slots // constants["KEYS"])), *(Loop(1),) * 2, Loop(joined), of_columns
    return Work(loops, length * share / layer.group_rows, len(layer.layout.groups))
