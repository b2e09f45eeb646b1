"""Measure a decode step over rows in which heads share all but their fast planes (a trial kernel, see parted_kernel).

    python3 artifacts/studies/parted_decode.py -o FILE.jsonl --seconds 120     # on a GPU, from a checkout
    python3 artifacts/studies/parted_decode.py --count                         # instructions a key, without a GPU
    TRITON_INTERPRET=1 python3 artifacts/studies/parted_decode.py --interpret  # beside float64, without a GPU

Layers of llama3-8b (8 KV heads of 128, 4 query heads each, 18 fast planes, or 16) and of smollm2 (3 of 64, 3 each, 11)
in bfloat16, blocks of 64 positions. `128x2` has 128 nibbles a head, and two heads in a row. Operands are random, so
that neither accuracy nor bits are measured: only time, and the error of the kernel's arithmetic. Queries are absorbed
and slices joined by rotor's kernels, to which such a row is a joint latent.

Kernels are compiled by all cores while the GPU measures those that are ready. A line of JSON for each result, as it
comes; its `row` is
- `SDPA`: PyTorch's flash attention, uncompressed
- `error`: too far from float64, and so not timed
- `decode`: the decode kernel alone at 8 x 32K, with the best of several numbers of programs
- `step`: all kernels of a step, and each apart
- `today`: a step of the joint kernels in use on the same rows
- `failed`, with the reason.
A `first_s` above a second says that a kernel was compiled again instead of found in Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from parted_kernel import parted_kernel
from torch import Tensor

from rotor.checkpoint.layout import AttentionShape, GroupLayout, KeyForm, LayerLayout
from rotor.checkpoint.rows import CodedRow
from rotor.kernels.absorb import absorb_kernel
from rotor.kernels.decoding import BlockRotations, DecodeLayer, assembled, decode_attention
from rotor.kernels.defaults import decode_tile
from rotor.kernels.join import join_kernel
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.ranges import KeyRanges

BLOCK = 64
TOLERANCE = 0.005
SHAPES = {
    "llama3-8b": AttentionShape(1, 32, 8, 128, 4096, rotary_dim=128),
    "smollm2": AttentionShape(1, 9, 3, 64, 576, rotary_dim=64),
}
LOADS = {"8 x 32K": (8, 32768), "1 x 32K": (1, 32768), "64 x 8K": (64, 8192)}
SMS = 132


@dataclass(frozen=True)
class Parted:
    """A layer: nibbles a head, KV heads a row, fast planes, planes of 16 nibbles of a fast latent."""

    model: str
    nibbles: int
    heads: int
    fast: int
    latent: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.nibbles}x{self.heads}, F {self.fast}, {16 * self.latent} nibbles"

    @property
    def shape(self) -> AttentionShape:
        return SHAPES[self.model]

    @property
    def words(self) -> int:
        return self.nibbles * self.heads // 4

    def chunks(self, chunk: int) -> tuple[int, int]:
        """How many chunks of planes are rebuilt, and whether eight planes behind them suffice for what is left."""
        count, left = divmod(self.fast, chunk)
        return (count, 1) if count and 0 < left <= 8 else (count + (left > 0), 0)

    @property
    def layout(self) -> LayerLayout:
        """The row as a joint latent."""
        latent = CodedRow(n4=self.nibbles * self.heads)
        starts = range(0, self.shape.num_kv_heads, self.heads)
        groups = tuple(GroupLayout(tuple(range(i, i + self.heads)), latent, None) for i in starts)
        return LayerLayout(groups, *KeyForm(BLOCK, self.fast))


@dataclass(frozen=True)
class Variant:
    """How the kernel is made, see `parted_kernel`. slices: programs an SM. registers: the most of a thread, 0: any."""

    part: int = 16
    keys: int = 64
    warps: int = 1
    stages: int = 2
    chunk: int = 16
    scales: int = 0
    ahead: int = 1
    again: int = 0
    lean: int = 0
    split: int = 1
    registers: int = 0
    slices: int = 8

    @property
    def compiled(self) -> Variant:
        """What of it the compiler sees."""
        return replace(self, slices=8)


class Layer:
    """Random bases of a layer, of which fast planes see their head's latent alone, and what kernels go by."""

    def __init__(self, of: Parted, device: torch.device, dtype: torch.dtype) -> None:
        self.of, self.device, self.dtype = of, device, dtype
        shape, layout, words = of.shape, of.layout, of.words
        self.groups, self.rows = len(layout.groups), of.heads * shape.heads_per_kv
        generator = torch.Generator(device).manual_seed(0)
        width = 4 * words

        def normal(*size: int, scale: float) -> Tensor:
            return scale * torch.randn(size, generator=generator, device=device)

        basis = normal(of.heads, shape.head_dim, self.groups, 4, words, scale=width**-0.5 / 4.6)
        nibble, word = torch.meshgrid(torch.arange(4), torch.arange(words), indexing="ij")
        self.latent_of = (4 * (word // 16) + nibble).div(of.latent, rounding_mode="floor").clamp(max=of.heads)
        half = shape.rotary_planes
        for head in range(of.heads):
            own = (self.latent_of == head).to(device)
            for planes in (slice(0, of.fast), slice(half, half + of.fast)):
                basis[head, planes] *= own * (width / (16 * of.latent)) ** 0.5
        basis = basis.reshape(of.heads * shape.head_dim, -1).to(dtype)
        constant = normal(shape.num_kv_heads, shape.head_dim, scale=0.5)
        self.parameters = AttentionParameters(layout, shape, shape.head_dim**-0.5, basis, constant)
        self.layer = DecodeLayer(self.parameters, dtype, device)

    def fast_parts(self, chunk: int, scaled: bool) -> tuple[Tensor, ...]:
        """fast_basis, fast_constant and those of the tail; with scales constants are what nibbles read too large."""
        of, layer = self.of, self.layer
        assert layer.fast_basis is not None
        assert layer.fast_constant is not None
        planes = []
        for head in range(of.heads):
            own = range(head * of.latent, (head + 1) * of.latent)
            parts = [layer.fast_basis[:, head, p % 4, :, :, p // 4 * 16 : p // 4 * 16 + 16] for p in own]
            planes.append(torch.stack(parts, 1))
        basis = torch.stack(planes, 1)  # [groups, heads, latent, 2, FAST, 16]
        constant = layer.fast_constant if not scaled else -layer.offset * basis.float().sum((2, 5))
        count, tail = of.chunks(chunk)
        begin, end = count * chunk, count * chunk + 8
        tail_basis, tail_constant = basis[..., :16, :], constant[..., :16]
        if tail:
            k0, k1 = basis[..., begin:end, :].unbind(3)
            tail_basis = torch.stack([torch.cat([k0, k1], -2), torch.cat([-k1, k0], -2)], 3)
            k0, k1 = constant[..., begin:end].unbind(2)
            tail_constant = torch.stack([torch.cat([k0, k1], -1), torch.cat([-k1, k0], -1)], 2)
        basis = basis[:, :, :, :, :begin].unflatten(4, (count, chunk)).permute(0, 1, 4, 2, 3, 5, 6)
        constant = constant[..., :begin].unflatten(3, (count, chunk)).permute(0, 1, 3, 2, 4)
        return basis.contiguous(), constant.contiguous(), tail_basis.contiguous(), tail_constant.contiguous()

    def constant_keys(self, places: Tensor) -> Tensor:
        """[groups, heads, BLOCK, 2, FAST]: fast planes of the constant key, rotated to each place."""
        of, half = self.of, self.of.shape.rotary_planes
        assert self.parameters.key_constant is not None
        constant = self.parameters.key_constant.unflatten(0, (self.groups, of.heads))[:, :, None]
        k0, k1 = constant[..., : of.fast], constant[..., half : half + of.fast]
        cos, sin = places.float()[..., : of.fast]
        found = torch.zeros(self.groups, of.heads, BLOCK, 2, places.shape[-1], device=self.device)
        found[..., 0, : of.fast], found[..., 1, : of.fast] = k0 * cos - k1 * sin, k1 * cos + k0 * sin
        return found.to(self.dtype)


class Step:
    """A decode step of one token a sequence: its inputs, of which there are `copies` of rows, and its memory."""

    def __init__(self, layer: Layer, batch_size: int, kv_len: int, copies: int = 1) -> None:
        self.layer, self.kv_len = layer, kv_len
        of, device, dtype = layer.of, layer.device, layer.dtype
        shape, groups = of.shape, layer.groups
        generator = torch.Generator(device).manual_seed(1)
        frequency = 5e5 ** (-torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64) / shape.rotary_dim)
        angle = torch.arange(kv_len, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
        self.rotation = angle.cos().float().to(device), angle.sin().float().to(device)
        self.blocks = BlockRotations.of(self.rotation, of.layout, dtype)
        query = torch.randn(batch_size, shape.num_heads, shape.head_dim, generator=generator, device=device)
        self.query = (2 * query).to(dtype)
        self.size = batch_size, kv_len, groups * of.words
        own = (batch_size, kv_len, 2 * groups * of.words)
        self.rows = []
        for _ in range(copies):
            rows = torch.randint(256, own, generator=generator, device=device, dtype=torch.uint8).view(torch.int16)
            self.rows.append(rows)
        self.set_scales(generator)
        self.ranges = KeyRanges.of_lengths(torch.full((batch_size,), kv_len, device=device))
        self.max_blocks = -(-kv_len // BLOCK) + 1
        lines = batch_size, self.max_blocks, groups, layer.rows
        columns = layer.layer.columns
        self.absorbed = torch.zeros(*lines, 4, columns, dtype=dtype, device=device)
        self.constant = torch.zeros(lines, device=device)
        self.fast_query = torch.zeros(*lines, 2, layer.layer.fast, dtype=dtype, device=device)
        self.places = self.blocks.places
        self.constant_keys = layer.constant_keys(self.places)
        slots = 40 * SMS + batch_size * groups
        self.partial = torch.empty(slots, layer.rows, 4, columns, device=device)
        self.partial_lse = torch.empty(slots, layer.rows, device=device)
        self.output = torch.empty(batch_size, layer.layer.output_width, dtype=dtype, device=device)
        self.table = layer.layer.table(8, 8)
        self._parts: dict[tuple[int, bool], tuple[Tensor, ...]] = {}
        self._of_scales: dict[int, tuple[Tensor, Tensor]] = {}

    def set_scales(self, generator: torch.Generator) -> None:
        """Scales of 1/2 to 2 in the last words of each group: others make logits that no model has."""
        words = self.layer.of.words
        for rows in self.rows:
            by_group = rows.view(*rows.shape[:2], self.layer.groups, words)
            for last in (words - 1, words - 2):
                n = torch.randint(6, 11, (*by_group.shape[:3], 4), generator=generator, device=rows.device)
                value = (n << torch.tensor([0, 4, 8, 12], device=rows.device)).sum(-1)
                by_group[..., last] = torch.where(value >= 32768, value - 65536, value).to(torch.int16)

    @property
    def log2_scale(self) -> float:
        return self.layer.parameters.scaling * math.log2(math.e)

    def absorb(self) -> None:
        layer, query, basis = self.layer.layer, self.query, self.layer.layer.basis
        assert basis is not None
        batch_size, heads = query.shape[:2]
        constants = layer.absorb_constants(1)
        chunks = -(-self.max_blocks // constants["COUNT"])
        shared = min(chunks, max(1, 4 * SMS // (heads * batch_size)))
        absorb_kernel[shared, heads, batch_size](
            query, basis, layer.constant, self.blocks.slow, self.blocks.fast, self.absorbed, self.constant,
            self.fast_query, self.table, self.ranges.begin, self.ranges.until, self.ranges.begin, self.layer.groups,
            self.max_blocks, query.stride(0) // 16, query.stride(1) // 16, basis.stride(0) // layer.basis_align,
            self.log2_scale, ALIGN=16, enable_fp_fusion=True, **layer.absorb_options(), **constants,
        )  # fmt: skip

    def offsets(self, scales: int) -> tuple[Tensor, Tensor]:
        """The logits that blocks share, and what each scale's nibbles add; as the absorbing kernel would leave them."""
        if not scales:
            return self.constant, self.constant
        if scales not in self._of_scales:
            of, columns = self.layer.of, self.absorbed.shape[-1]
            latent = self.layer.latent_of.to(self.query.device)
            latent = torch.zeros_like(latent) if scales == 1 else latent
            wide = torch.nn.functional.pad(latent, (0, columns - of.words), value=scales - 1)
            sums = [(self.absorbed * (wide == s)).float().sum((-1, -2)) for s in range(scales)]
            offsets = self.layer.layer.offset * torch.stack(sums, 3)
            self._of_scales[scales] = self.constant + self.log2_scale * offsets.sum(3), offsets.contiguous()
        return self._of_scales[scales]

    def decode(self, variant: Variant, copy: int = 0) -> None:
        layer, of = self.layer, self.layer.of
        key = variant.chunk, variant.scales > 0
        if key not in self._parts:
            self._parts[key] = layer.fast_parts(*key)
        constant, offsets = self.offsets(variant.scales)
        options: dict[str, Any] = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
        if variant.registers:
            options["maxnreg"] = variant.registers
        parted_kernel[variant.slices * SMS, variant.split](
            self.absorbed, constant, offsets, self.fast_query, self.rows[copy], *self._parts[key], self.places,
            self.constant_keys, self.partial, self.partial_lse, self.ranges.begin, self.ranges.until,
            self.size[0], layer.groups, self.max_blocks, self.size[1] * self.size[2], self.log2_scale,
            HEADS=of.heads, PER_HEAD=of.shape.heads_per_kv, ROWS=max(8, triton.next_power_of_2(layer.rows)),
            WORDS=of.words, ROW=self.size[2], COLUMNS=layer.layer.columns, PART=variant.part, LATENT=of.latent,
            FAST=layer.layer.fast, CHUNK=variant.chunk, CHUNKS=of.chunks(variant.chunk)[0],
            TAIL=of.chunks(variant.chunk)[1], BLOCK=BLOCK, KEYS=variant.keys, STAGES=variant.stages,
            SCALES=variant.scales, AHEAD=variant.ahead, AGAIN=variant.again, LEAN=variant.lean, SPLIT=variant.split,
            PRECISION="ieee" if self.query.dtype == torch.float32 else "tf32", ASM=assembled(), **options,
        )  # fmt: skip

    def join(self, variant: Variant) -> None:
        layer = self.layer.layer
        join_kernel[self.query.shape[1], self.query.shape[0]](
            self.partial, self.partial_lse, self.output, self.table, self.ranges.begin, self.ranges.until,
            self.ranges.begin, self.size[0], self.layer.groups, variant.slices * SMS, self.output.stride(0),
            CODED=4, GROUP_ROWS=self.layer.rows, TOKENS=1, VALUE_COLUMNS=layer.value_columns, STEP=variant.keys,
            SLICES=16, PADDED=triton.next_power_of_2(4 * layer.value_columns), num_warps=4,
        )  # fmt: skip

    def run(self, variant: Variant, copy: int = 0) -> Tensor:
        self.absorb()
        self.decode(variant, copy)
        self.join(variant)
        return self.output

    def today(self, copy: int) -> Callable[[], Tensor]:
        """A step of the joint kernel in use over the same rows, without scales."""
        rows = self.rows[copy].view(torch.uint8)
        tile = decode_tile(self.layer.of.layout, self.layer.rows)
        return lambda: decode_attention(
            self.query, rows, rows, self.layer.layer, self.ranges, self.blocks, tiles=tile, out=self.output
        )

    def exact(self, scales: int) -> Tensor:
        """The output in float64, from the rows as they are read: nibbles less 8, times their latent's scale."""
        of, shape, groups = self.layer.of, self.layer.of.shape, self.layer.groups
        batch_size, kv_len = self.size[:2]
        words = self.rows[0].view(batch_size, kv_len, groups, 1, of.words).int() & 0xFFFF
        z = ((words >> torch.arange(0, 16, 4, device=words.device)[:, None]) & 15).double() - 8
        if scales:
            s = torch.arange(scales, device=words.device)
            n = (words[..., 0, of.words - 1 - s // 4] >> (4 * (s % 4))) & 15
            of_latent = torch.exp2(n.double() / 2 - 4)  # [batch_size, kv_len, groups, scales]
            latent = self.layer.latent_of.to(words.device)
            latent = torch.zeros_like(latent) if scales == 1 else latent
            z = z * of_latent[..., latent]
        z = z.flatten(3)
        assert self.layer.layer.basis is not None
        assert self.layer.parameters.key_constant is not None
        basis = self.layer.layer.basis.double().view(of.heads, shape.head_dim, groups, -1)
        key = torch.einsum("bnge,hdge->bnghd", z, basis)
        key = key + self.layer.parameters.key_constant.double().view(groups, of.heads, shape.head_dim)
        half = shape.rotary_planes
        position = torch.arange(kv_len, device=words.device)
        fast = torch.arange(half, device=words.device) < of.fast
        cos, sin = (torch.where(fast, t[:, :half], t[position // BLOCK * BLOCK, :half]).double() for t in self.rotation)
        cos, sin = cos[:, None, None], sin[:, None, None]
        k0, k1 = key[..., :half], key[..., half:]
        key = torch.cat([k0 * cos - k1 * sin, k1 * cos + k0 * sin], -1)
        query = self.query.double().view(batch_size, groups, of.heads, shape.heads_per_kv, shape.head_dim)
        logits = torch.einsum("bghqd,bnghd->bghqn", query, key) * self.layer.parameters.scaling
        return torch.einsum("bghqn,bnge->bghqe", logits.softmax(-1), z).reshape(batch_size, -1)

    def error(self, variant: Variant) -> float:
        self.partial.fill_(float("nan"))
        self.partial_lse.fill_(float("nan"))
        self.absorb()
        got, exact = self.run(variant).double(), self.exact(variant.scales)
        return float((got - exact).norm() / exact.norm())


# What is measured ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layer and a variant, of which the decode kernel alone is timed; `step`: a step at each load; `today`: the
    joint kernel in use on the same rows.
    """

    of: Parted
    variant: Variant = Variant()
    kind: str = "decode"


GOALS = [
    Parted("llama3-8b", 128, 2, 18, 3), Parted("llama3-8b", 128, 1, 18, 3), Parted("llama3-8b", 128, 4, 18, 3),
    Parted("llama3-8b", 64, 2, 18, 3), Parted("llama3-8b", 256, 2, 18, 3), Parted("smollm2", 64, 3, 11, 2),
    Parted("smollm2", 128, 3, 11, 2),
]  # fmt: skip
ROUNDED = [replace(of, fast=16, latent=2) for of in GOALS if of.model == "llama3-8b"]
"""The same with as many fast planes as a product takes."""

SLICES = (8, 12, 16, 24, 32)
"""Warps an SM that a variant's programs are timed with."""


def base(of: Parted) -> Variant:
    """What each sweep begins from."""
    size = max(8, of.heads * of.shape.heads_per_kv) * of.words
    if size <= 768:
        return Variant(keys=32, stages=2)
    return Variant(part=32, keys=32, warps=2, stages=2)


def cases() -> list[Case]:
    """All, the most wanted first."""
    found = [Case(of, base(of), "step") for of in (*GOALS, *ROUNDED)]
    found += [Case(of, replace(base(of), scales=1), "step") for of in (*GOALS, *ROUNDED)]
    sweeps = [[Case(of, variant) for variant in sweep(of)] for of in (*GOALS, *ROUNDED)]
    for turn in range(max(map(len, sweeps))):
        if turn == 6:
            found += [Case(of, kind="today") for of in GOALS if of.heads < 4]
        found += [sweep[turn] for sweep in sweeps if turn < len(sweep)]
    return list(dict.fromkeys(found))


def sweep(of: Parted) -> list[Variant]:
    """Variants of one layer, near its base first."""
    of_base, found = base(of), []
    for changes in CHANGES:
        variant = replace(of_base, **changes)
        parts, left = divmod(of.words, variant.part)
        scaled = variant.scales if variant.scales < 2 else of.heads + 1
        if left or parts % variant.split or (scaled > 1 and variant.part > 16):
            continue
        found.append(replace(variant, scales=scaled))
    return [variant for variant in dict.fromkeys(found) if variant != of_base]


CHANGES: list[dict[str, Any]] = [
    {"stages": 1}, {"ahead": 0}, {"registers": 168}, {"keys": 64}, {"lean": 1}, {"again": 2},
    {"part": 32, "warps": 2, "keys": 64}, {"part": 16, "warps": 1, "split": 2}, {"registers": 128}, {"stages": 3},
    {"stages": 1, "ahead": 0}, {"part": 32, "warps": 2}, {"lean": 3}, {"again": 1}, {"chunk": 32}, {"scales": 2},
    {"keys": 64, "stages": 1}, {"part": 64, "warps": 4}, {"part": 64, "warps": 4, "keys": 64},
    {"registers": 168, "lean": 3}, {"registers": 128, "lean": 3}, {"stages": 3, "ahead": 0},
    {"registers": 168, "stages": 1}, {"registers": 128, "stages": 1}, {"keys": 16}, {"keys": 64, "lean": 3},
    {"part": 32, "warps": 2, "stages": 1}, {"part": 32, "warps": 2, "registers": 128},
    {"part": 16, "warps": 1, "split": 2, "registers": 128}, {"part": 32, "warps": 2, "keys": 64, "stages": 1},
    {"part": 32, "warps": 2, "keys": 64, "again": 2}, {"part": 16, "warps": 1, "split": 4},
    {"stages": 4, "ahead": 0}, {"keys": 64, "again": 2}, {"keys": 64, "registers": 168}, {"stages": 4}, {"part": 32},
]  # fmt: skip
"""What a sweep changes of the base."""


# Compiling without a GPU --------------------------------------------------------------------------------------------


def compile_case(case: Case, arch: int) -> dict[str, Any]:
    """Compile the kernel into Triton's cache; registers, spilled and shared bytes, instructions a key and KV head."""
    from rotor.tools.bench.sass import Graph, Loop, disassemble, usage
    from rotor.tools.bench.variants import recorded

    start = time.perf_counter()
    torch.set_num_threads(1)
    layer = Layer(case.of, torch.device("cpu"), torch.bfloat16)
    step = Step(layer, 1, 128)
    with recorded(arch) as launched:
        if case.kind == "today":
            step.today(0)()
        elif case.kind == "step":
            step.run(case.variant)
        else:
            step.decode(case.variant)
            step.join(case.variant)
    for found in launched:
        options = dict(found.options)
        if found.name in ("parted_kernel", "decode_kernel"):
            if case.variant.registers:
                options["maxnreg"] = case.variant.registers
            compiled = triton.compile(found.source, target=found.target, options=options)
        else:
            found.compile()
    if case.kind == "today":
        return {"compile_s": round(time.perf_counter() - start, 2)}
    record: dict[str, Any] = {"shared_bytes": int(compiled.metadata.shared)}
    try:
        registers, spilled = usage(compiled.asm["cubin"])
        record |= {"registers": registers, "spilled_bytes": spilled}
        sass = disassemble(compiled.asm["cubin"])
        tiles = 8 * layer.groups * 32768 / case.variant.keys / (SMS * case.variant.slices)
        parts = 1 + tiles * case.variant.keys / 32768
        count = Graph(sass).count((Loop(1), Loop(parts, (Loop(1), Loop(tiles / parts)))))
        a_key = count * case.variant.warps * case.variant.split / (tiles * case.variant.keys * case.of.heads)
        record["instructions_per_key"] = round(a_key, 2)
        opcodes = ("HMMA", "LDSM", "LDGSTS", "LDG", "LDS", "STS", "BAR", "SHFL", "LDL", "STL")
        record["code"] = {op: sass.count(f" {op}") for op in opcodes}
    except Exception as failure:
        record["not_counted"] = " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
    return record | {"compile_s": round(time.perf_counter() - start, 2)}


def interpret() -> None:
    """Errors of small layers in Triton's interpreter, in float32 and float16, whatever the variant."""
    torch.manual_seed(0)
    small = [Parted("smollm2", 64, 3, 11, 2), Parted("llama3-8b", 64, 2, 18, 3)]
    variants = [
        Variant(keys=32, ahead=0), Variant(scales=1, lean=3), Variant(scales=4, again=2),
        Variant(scales=1, split=2, again=1), Variant(split=2), Variant(chunk=32, part=32, again=2),
    ]  # fmt: skip
    for of in small:
        for dtype in (torch.float32, torch.float16):
            step = Step(Layer(of, torch.device("cpu"), dtype), 2, 150)
            for variant in variants:
                if of.words // variant.part % variant.split or of.words % variant.part:
                    continue
                if variant.scales > 1:
                    variant = replace(variant, scales=of.heads + 1)
                print(f"{of.name}, {dtype}, {variant}: {step.error(replace(variant, slices=1)):.2e}", flush=True)


def measure_case(case: Case, layers: dict[Any, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Records of one case: beside float64 first, then times."""

    def step(load: str) -> Step:
        if (case.of, load) not in layers:
            if case.of not in layers:
                layers[case.of] = Layer(case.of, device, torch.bfloat16)
            size = LOADS.get(load, (2, 2085))
            row_bytes = 2 * case.of.words * case.of.shape.num_kv_heads // case.of.heads
            copies = 1 if load == "check" else max(2, -(-CACHES_BYTES // (size[0] * size[1] * row_bytes)))
            layers[case.of, load] = Step(layers[case.of], *size, copies)
        return layers[case.of, load]

    if case.kind == "today":
        for load in LOADS:
            of = step(load)
            calls = [of.today(copy) for copy in range(len(of.rows))]
            yield {"row": "today", "load": load, "us": time_us(calls)}
        return
    check = step("check")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    check.decode(case.variant)
    first_s = round(time.perf_counter() - begun, 2)
    error = check.error(case.variant)
    if not error <= TOLERANCE:
        yield {"row": "error", "error": error}
        return
    slices = {programs: replace(case.variant, slices=max(1, programs // case.variant.warps)) for programs in SLICES}
    of = step("8 x 32K")
    copies = range(len(of.rows))
    of.absorb()
    us = {warps: time_us([call(of.decode, variant, copy) for copy in copies]) for warps, variant in slices.items()}
    best = slices[min(us, key=lambda warps: us[warps])]
    yield {"row": "decode", "load": "8 x 32K", "error": error, "us": min(us.values()), "us_by_warps_an_sm": us,
           "slices": best.slices, "first_s": first_s}  # fmt: skip
    if case.kind != "step":
        return
    for load in LOADS:
        of = step(load)
        copies = range(len(of.rows))
        parts = {
            "absorb": time_us([of.absorb] * 4),
            "decode": time_us([call(of.decode, best, copy) for copy in copies]),
            "join": time_us([call(of.join, best)] * 4),
        }
        whole_us = time_us([call(of.run, best, copy) for copy in copies])
        yield {"row": "step", "load": load, "error": error, "us": whole_us, "parts_us": parts, "slices": best.slices}


def call(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


CACHES_BYTES = 200 << 20
"""What rotated caches take together at least: four times the L2 of an H100."""


def time_us(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of a call: median over replays of a CUDA graph of all of them."""
    for each in calls:
        each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in calls:
            each()
    found = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / len(calls))
    return round(median(found[1:]), 2)


def stock(device: torch.device) -> Iterator[dict[str, Any]]:
    """PyTorch's flash attention over the uncompressed caches."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from rotor.tools.bench.attention import sdpa, uncompressed_heads

    generator = torch.Generator(device).manual_seed(0)
    for (model, shape), (load, (batch_size, kv_len)) in product(SHAPES.items(), LOADS.items()):
        cache_bytes = 4 * batch_size * kv_len * shape.num_kv_heads * shape.head_dim
        copies = max(2, -(-CACHES_BYTES // cache_bytes))
        heads = [uncompressed_heads(shape, batch_size, 1, kv_len, torch.bfloat16, generator) for _ in range(copies)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield {"row": "SDPA", "layout": model, "load": load, "us": time_us([sdpa(*own) for own in heads])}
        del heads
        torch.cuda.empty_cache()


def measure(out: Path, seconds: float) -> None:
    """Compile everything on all cores, and time what is ready, the most wanted first, until time is up."""
    end = time.monotonic() + seconds
    start = time.monotonic()
    wanted = cases()
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
    waiting: dict[Case, Future[dict[str, Any]]] = {case: pool.submit(compile_case, case, 90) for case in wanted}
    device = torch.device("cuda")
    layers: dict[Any, Any] = {}

    def write(record: dict[str, Any]) -> None:
        record = {"at_s": round(time.monotonic() - start, 1), **record}
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        row = {key: value for key, value in record.items() if key not in ("code", "variant")}
        print(json.dumps(row), flush=True)

    torch.cuda.synchronize()
    write({"row": "device", "name": torch.cuda.get_device_name(), "torch": torch.__version__,
           "triton": triton.__version__, "cases": len(wanted), "workers": workers})  # fmt: skip
    with torch.inference_mode():
        for record in stock(device):
            write(record)
        while waiting and time.monotonic() < end:
            case = next((case for case, future in waiting.items() if future.done()), None)
            if case is None:
                time.sleep(0.02)
                continue
            future = waiting.pop(case)
            about = {"layout": case.of.name, "changes": changes(case), "variant": asdict(case.variant)}
            if (failure := future.exception()) is not None:
                write({"row": "failed", **about, "why": why(failure)})
                continue
            try:
                for record in measure_case(case, layers, device):
                    write({**about, **record, **future.result()})
            except Exception as error:
                write({"row": "failed", **about, "why": why(error), **future.result()})
                if isinstance(error, torch.AcceleratorError):
                    break  # nothing works after it
    write({"row": "end", "not_measured": len(waiting)})
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def changes(case: Case) -> dict[str, Any]:
    """What of a variant is not the layer's base."""
    of_base = asdict(base(case.of))
    return {key: value for key, value in asdict(case.variant).items() if of_base[key] != value}


def why(failure: BaseException) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())[-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="file of JSON lines, appended to")
    parser.add_argument("--seconds", type=float, default=120, help="measure no longer (default 120)")
    parser.add_argument("--count", metavar="LAYOUT", nargs="?", const="", help="compile and count steps, without a GPU")
    parser.add_argument("--interpret", action="store_true", help="errors in Triton's interpreter")
    options = parser.parse_args()
    if options.interpret:
        interpret()
    elif options.count is not None:
        for case in cases():
            if case.kind == "step" and case.of.name.startswith(options.count):
                print(
                    json.dumps({"layout": case.of.name, "changes": changes(case), **compile_case(case, 90)}), flush=True
                )
    elif options.out is None:
        parser.error("-o FILE: where are results to go?")
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device: use --count or --interpret")
    else:
        measure(options.out, options.seconds)


if __name__ == "__main__":
    main()
