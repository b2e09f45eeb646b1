"""The decode kernel in CUDA C++ (cuda/decode.cu): a study beside Triton's, on rows of the same bytes. Nothing in the
product goes by it.

nvcc compiles it for a GPU, and to count what it issues; g++ with an emulator runs the same source on a CPU, to check
its mathematics.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rotor.kernels.launch import capability_of, sm_count
from rotor.tools.bench.attention import TOLERANCE, Call, kernel, relative_error

from .count import count_layers
from .loads import CUDA_ROWS, LOADS
from .plan import Record
from .sanitizer import under
from .sass import Graph, Loop, disassemble, usage
from .subjects import STEP, gpu_subjects
from .times import cold_seconds, contiguous, copies, part_seconds
from .work import SMS

SOURCE = Path(__file__).parent / "cuda" / "decode.cu"

BLOCK, KEYS, WARPS, ROWS = 64, 128, 4, 8
"""Positions of a block, keys of a tile, warps of a program and query rows of a group, as in the source."""

PROGRAMS_PER_SM = {64: 4, 128: 4, 256: 2}
"""As many as an SM holds by their registers and shared memory, for rows of so many bytes."""


@dataclass(frozen=True)
class Step:
    """A decode step over rows of nibbles.

    rows: [sequences, keys, groups, bytes], uint8.
    query: absorbed, float32, [sequences, blocks, groups, ROWS, bytes, 2], for the lower and the higher nibble of each
        byte, in exponents of 2; nothing of the scale's nibble.
    scaled, plain: [sequences, blocks, groups, ROWS], what a key's scale multiplies, and what is added.
    """

    rows: Tensor
    query: Tensor
    scaled: Tensor
    plain: Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """sequences, keys, groups, bytes."""
        sequences, keys, groups, size = self.rows.shape
        return sequences, keys, groups, size

    def nibbles(self, sequence: int, group: int) -> tuple[Tensor, Tensor]:
        """Digits less 8, [keys, bytes, 2], and scales, [keys], of a sequence and group, float64."""
        rows = self.rows[sequence, :, group]
        digits = torch.stack([rows & 15, rows >> 4], -1).double() - 8
        return digits, (digits[:, 0, 0] / 2).exp2()

    def logits(self, digits: Tensor, scales: Tensor, sequence: int, group: int) -> Tensor:
        """[ROWS, keys], float64."""
        blocks = digits.unflatten(0, (-1, BLOCK)).flatten(2)  # [blocks, BLOCK, 2 bytes]
        own = slice(sequence, sequence + 1), slice(None), group
        query, scaled, plain = (of[own][0].double() for of in (self.query, self.scaled, self.plain))
        sums = query.flatten(2) @ blocks.mT + scaled[..., None]  # [blocks, ROWS, BLOCK]
        return (sums * scales.view(-1, 1, BLOCK) + plain[..., None]).transpose(0, 1).flatten(1)

    def attended(self) -> Tensor:
        """Weighted digits, [sequences, groups, ROWS, bytes, 2], float64."""
        sequences, _, groups, _ = self.sizes
        found = []
        for sequence in range(sequences):
            for group in range(groups):
                digits, scales = self.nibbles(sequence, group)
                weights = self.logits(digits, scales, sequence, group).mul(LN2).softmax(-1)
                found.append(torch.einsum("rk,kbn->rbn", weights * scales, digits))
        return torch.stack(found).unflatten(0, (sequences, groups))


LN2 = 0.6931471805599453


def random_step(
    sizes: tuple[int, int, int, int],
    generator: torch.Generator,
    spread: float = 0.3,
    peaks: int = 0,
    drift: float = 0.0,
) -> Step:
    """Random rows and queries.

    Args:
        sizes: sequences, keys (a multiple of KEYS), groups, bytes of a group's row.
        spread: of logits. peaks: keys that take most of the attention. drift: by how much logits rise to the end.
    """
    sequences, keys, groups, size = sizes
    device, blocks = generator.device, keys // BLOCK

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    low, high = ((7.5 + 3 * normal(sequences, keys, groups, size)).round().clamp(0, 15).byte() for _ in range(2))
    low[..., 0] = (8 + 1.5 * normal(sequences, keys, groups)).round().clamp(0, 15).byte()
    digits = torch.stack([low, high], -1)
    query = normal(sequences, blocks, groups, ROWS, size, 2) * (spread / (3 * (2 * size) ** 0.5))
    query *= (0.7 * normal(size, 2)).exp()
    for key in torch.randint(keys, (peaks,), generator=generator, device=device).tolist():
        query[:, key // BLOCK] += 12 / (2 * size) * (digits[:, key, :, None].float() - 8) / 9
    query[..., 0, 0] = 0
    scaled, plain = (0.5 * normal(sequences, blocks, groups, ROWS) for _ in range(2))
    plain += drift * torch.arange(blocks, device=device)[:, None, None] / blocks
    return Step(low | high << 4, query, scaled, plain)


def integer_queries(step: Step) -> tuple[Tensor, Tensor]:
    """Absorbed queries and constants as the kernel takes them, see there: uint8 and float32."""
    lower, higher = step.query.unbind(-1)  # [sequences, blocks, groups, ROWS, bytes]
    of_bytes, of_lower = higher / 16, lower - higher / 16
    unit = torch.maximum(of_bytes.abs().amax(-1), of_lower.abs().amax(-1) / 16) / (127 * 128)
    parts, excess = [], torch.zeros_like(unit)
    for query, times, too_much in ((of_bytes, 1, 136), (of_lower, 16, 8)):
        whole = (query / (times * unit[..., None])).round()
        high = (whole / 128).round()
        parts.append(torch.stack([high, whole - 128 * high], -1))
        excess += too_much * times * unit * whole.sum(-1)
    # Columns by steps, halves, quarters: the fragments of mma.m16n8k32. [.., ROWS, step, half, quarter, 4, hi and lo,
    # operand] becomes [.., step, operand, row, quarter, half, hi and lo, 4].
    fragments = torch.stack(parts, -1).unflatten(-3, (-1, 2, 4, 4))
    order = 0, 1, 2, 4, 9, 3, 6, 5, 8, 7
    packed = fragments.permute(order).to(torch.int8).view(torch.uint8).contiguous()
    return packed, torch.stack([unit, step.scaled - excess, step.plain, torch.zeros_like(unit)], -1).contiguous()


@dataclass(frozen=True)
class Launch:
    """Input and output of the kernel, see there; each program has slice_tiles tiles of a sequence and group."""

    rows: Tensor
    absorbed: Tensor
    constants: Tensor
    values: Tensor
    sums: Tensor
    slice_tiles: int

    @classmethod
    def of(cls, step: Step, programs: int) -> Launch:
        """Divide the tiles of a step among about so many programs."""
        sequences, keys, groups, size = step.sizes
        tiles = keys // KEYS
        slice_tiles = -(-tiles // max(1, programs // (sequences * groups)))
        slices = -(-tiles // slice_tiles)
        values = torch.empty(sequences, groups, slices, ROWS, 2, size, device=step.rows.device)
        sums = values.new_empty(sequences, groups, slices, WARPS, ROWS, 4)
        return cls(step.rows, *integer_queries(step), values, sums, slice_tiles)

    def run(self, library: ctypes.CDLL, stream: int = 0) -> None:
        """Launch it on a CUDA stream; raises RuntimeError with CUDA's error."""
        sequences, keys, groups, size = self.rows.shape
        strides = [ctypes.c_longlong(stride) for stride in (groups * size, keys * groups * size)]
        tensors = self.absorbed, self.constants, self.values, self.sums
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.rows, *tensors)]
        numbers = keys, self.slice_tiles, self.values.shape[2], groups, sequences
        error = library.launch(pointers[0], *strides, *pointers[1:], *numbers, ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"nibble_decode: CUDA error {error}")

    def attended(self) -> Tensor:
        """Join the slices: weighted digits, [sequences, groups, ROWS, bytes, 2], float64."""
        sums, (of_bytes, of_lower) = self.sums.double(), self.values.double().unbind(-2)
        reference = sums[:, :, :, 0, :, 2]
        share = (reference - reference.amax(2, keepdim=True)).exp2()
        total, scaled = ((share * sums[..., i].sum(3)).sum(2)[..., None] for i in (0, 1))
        of_bytes, of_lower = ((share[..., None] * values).sum(2) for values in (of_bytes, of_lower))
        digits = torch.stack([of_lower - 8 * scaled, (of_bytes - of_lower) / 16 - 8 * scaled], -1)
        return digits / total[..., None]


def shared_library(size: int, arch: int | None) -> ctypes.CDLL:
    """The kernel for rows of so many bytes: for a GPU, or where `arch` is None, for the emulator on this CPU."""
    if arch is None:
        command = ["g++", "-x", "c++", "-O1", "-std=c++17", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-DEMULATE"]
    else:
        command = [*NVCC, "-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{arch}"]
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(_compiled(command, size, Path(folder) / "decode.so")))


NVCC = ["nvcc", "-O3", "-std=c++17"]


def _compiled(command: list[str], size: int, out: Path) -> Path:
    done = subprocess.run([*command, f"-DBYTES={size}", str(SOURCE), "-o", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr[-3000:]}")
    return out


@dataclass(frozen=True)
class Count:
    """Registers and spilled bytes of a thread, and warp instructions a key and KV head of a group of two."""

    size: int
    arch: int
    registers: int
    spilled_bytes: int
    instructions_per_key: float


def count(size: int, arch: int) -> Count:
    """Compile the kernel for rows of so many bytes, and count it in the step that Triton's are counted in."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*NVCC, "-cubin", f"-arch=sm_{arch}"]
        cubin = _compiled(command, size, Path(folder) / "decode.cubin").read_bytes()
    groups, heads = 4, 2
    tiles = STEP.batch_size * groups * STEP.context_tokens / KEYS / (SMS * PROGRAMS_PER_SM[size])
    issued = Graph(disassemble(cubin)).count((Loop(tiles, longer=1 / tiles),))  # the first one takes a reference
    return Count(size, arch, *usage(cubin), WARPS * issued / (KEYS * tiles * heads))


def count_rows(archs: Sequence[int]) -> Iterator[tuple[str, str, int, int, float, float]]:
    """Layout, architecture, registers, spilled bytes, and instructions a key and KV head, its own and Triton's."""
    for arch in archs:
        for name, size in CUDA_ROWS.items():
            (layer,) = count_layers([gpu_subjects()[name]], [arch], step_alone=True)
            (triton,) = (each for each in layer.kernels if each.name.startswith("decode") and each.instructions_per_key)
            assert triton.instructions_per_key is not None
            own = count(size, arch)
            counts = own.instructions_per_key, triton.instructions_per_key
            yield name, f"sm_{arch}", own.registers, own.spilled_bytes, *counts


def timed(name: str, load: str, device: str = "cuda") -> Iterator[Record]:
    """Both kernels over caches that no L2 holds: seconds of the step, and of each kernel by the profiler."""
    where, subject, lengths = torch.device(device), gpu_subjects()[name], LOADS[load]
    generator = torch.Generator(where).manual_seed(0)
    step = random_step((len(lengths), lengths[0], len(subject.layout.groups), CUDA_ROWS[name]), generator)
    library, programs = (
        shared_library(CUDA_ROWS[name], capability_of(where)),
        PROGRAMS_PER_SM[CUDA_ROWS[name]] * sm_count(where),
    )
    first = Launch.of(step, programs)
    others = [replace(first, rows=first.rows.roll(i + 1, 1)) for i in range(copies(step.rows.nbytes) - 1)]

    def call(launch: Launch) -> Call:
        def run() -> Tensor:
            launch.run(library, torch.cuda.current_stream(where).cuda_stream)
            return launch.values

        return run

    calls = [call(launch) for launch in (first, *others)]
    calls[0]()
    error = relative_error(first.attended(), step.attended())
    problems = contiguous(subject, lengths, len(calls), where)
    parts = part_seconds([kernel(problem, subject.kernels) for problem in problems], where) | part_seconds(calls, where)
    about = {"layout": name, "load": load, "row": "CUDA C++, decode alone", "cache": "contiguous"}
    yield {
        **about,
        "seconds": cold_seconds(calls, where),
        "parts": parts,
        "error": error,
        "right": error <= TOLERANCE[torch.float16],
    }


def races() -> Iterator[Record]:
    """Hazards in shared memory by compute-sanitizer, in small launches for rows of each size."""
    output = under("racecheck", __name__)
    yield {"hazards": hazards(output), "output": output[-3000:]}


def hazards(text: str) -> int:
    """Count of hazards; raises RuntimeError if it did not come to an end."""
    found = re.search(r"RACECHECK SUMMARY: (\d+) hazard", text)
    if found is None:
        raise RuntimeError(f"compute-sanitizer: {text[-3000:]}")
    return int(found[1])


def launch_small() -> None:
    """Launch what compute-sanitizer looks at: several tiles, and references that move."""
    for size in CUDA_ROWS.values():
        step = random_step((2, 4 * KEYS, 2, size), torch.Generator("cuda").manual_seed(0), drift=30.0)
        Launch.of(step, 4).run(shared_library(size, capability_of(step.rows.device)))
        torch.cuda.synchronize()


if __name__ == "__main__":
    launch_small()
