"""Kernels compiled for GPUs that need not be there: a step over pages spills nothing at the sizes of an 8B, and one
kernel serves views of a cache wherever they begin.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from support.kernel_cases import CodedRow, NumberRow, layer, random_case, shape_of
from support.quick import mostly_nightly

pytest.importorskip("triton", reason="triton is not installed")

from gpu.count import count_layers
from gpu.sass import usage
from gpu.subjects import EXACT, PAGE, gpu_subjects, named_subjects, with_exact
from gpu.work import work_of

from rotor.checkpoint.layout import KeyForm, LayerLayout
from rotor.kernels.absorb_launch import Absorbing, block_starts
from rotor.kernels.append import append
from rotor.kernels.attention import ranges_of
from rotor.kernels.decode_launch import DecodeLayer, blocks_of, decode_attention
from rotor.kernels.exact_slots import SlotsToFill
from rotor.kernels.launch import shared_bytes
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.ranges import KeyRanges
from rotor.tools.bench.attention import random_slots, step_tensors, zero_scale
from rotor.tools.bench.variants import layer_variants, recorded

NEWEST = tuple(int(n) for n in version("triton").split(".")[:2]) >= (3, 9)

MOST_SPILLED_BYTES = 192 if NEWEST else 304
"""Of a thread, in kernels that no decode step over pages runs; the most is of coding a prompt on sm_80, with lanes
split, and more by Triton 3.6."""

SPILLED_IN_PAGES = 136 if NEWEST else 288
"""The tiles that were fastest on an H100 spill up to 88 bytes in layers of an 8B with two heads a row and 136 with one,
more with the assembler of Triton 3.6, and where three or four heads share it; tiles that spill nothing were slower."""

SPILLED_BY_WIDE_ROWS = 2520
"""Where three or four heads share a row, or a head has 256 nibbles; the most is of prompts of Gemma on sm_90."""

QUICK = [("llama3-8b-128x2", 90, PAGE)]
EVERY = [(name, arch, page) for name in named_subjects() for arch in (80, 90) for page in (0, PAGE)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in QUICK]


@pytest.mark.parametrize(("name", "arch", "page"), [*QUICK, *SLOW])
def test_nothing_is_spilled(name, arch, page) -> None:
    subject = replace(named_subjects()[name], page=page)
    for variant in layer_variants(subject, arch):
        registers, spilled_bytes = usage(variant.compile().asm["cubin"])
        assert registers <= 255
        most = SPILLED_IN_PAGES if work_of(variant, subject.kernels, arch).keys and page else MOST_SPILLED_BYTES
        assert spilled_bytes <= (
            SPILLED_BY_WIDE_ROWS if name.removesuffix("-blocks128").endswith(("x3", "x4", "256x2", "256x1")) else most
        ), variant.name


FITS = [(name, arch) for name in named_subjects() for arch in (80, 89, 90)]
FITS_QUICKLY = ("gemma3-270m-256x1", 89)


@pytest.mark.parametrize(
    ("name", "arch"), [case if case == FITS_QUICKLY else pytest.param(*case, marks=pytest.mark.slow) for case in FITS]
)
def test_programs_fit_into_shared_memory(name: str, arch: int) -> None:
    """Of which most GPUs for desktops have 99 KB a program; of many sequences and of few."""
    subject = named_subjects()[name]
    subject = replace(with_exact(subject) if name in EXACT else subject, page=0)
    most = shared_bytes(arch)
    for variant in layer_variants(subject, arch):
        if (name, arch) != FITS_QUICKLY or variant.kind == "absorb":
            assert variant.compile().metadata.shared <= most, variant.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3-8b-256x2", "llama3-8b-128x4", "gemma3-270m-256x1"])
def test_steps_of_many_rows_fit_too(name: str) -> None:
    """Several new tokens, whose queries take half of the shared memory."""
    subject, device = named_subjects()[name], torch.device("cpu")
    layout, shape, dtype = subject.layout, subject.shape, subject.dtype
    tokens = 64 // (layout.group_size * shape.heads_per_kv)
    stored = step_tensors(layout, shape, dtype, torch.zeros)
    names = "query_basis", "key_constant", "output_basis", "value_constant"
    parameters = AttentionParameters(layout, shape, 1.0, **{name: stored.get(name) for name in names})
    rotation = torch.zeros(2, 128, shape.rotary_dim).unbind()
    rows = torch.zeros(1, 64, layout.row_bytes(2)[0], dtype=torch.uint8), torch.zeros(1, 64, 0, dtype=torch.uint8)
    ranges = KeyRanges.packed(torch.tensor([0, tokens]), torch.tensor([64]), tokens, tokens)
    query = torch.zeros(tokens, shape.num_heads, shape.head_dim, dtype=dtype)
    with recorded(89) as launched:
        layer = DecodeLayer(parameters, dtype, device)
        decode_attention(query, *rows, layer, ranges, block_starts(rotation, layout))
        assert all(variant.compile().metadata.shared <= shared_bytes(89) for variant in launched)


@pytest.mark.parametrize(
    "layout",
    [layer(KeyForm(64), 2, CodedRow(n4=44)), layer(KeyForm(64), 1, (NumberRow(20), NumberRow(28)))],
    ids=["codes", "numbers"],
)
def test_one_kernel_serves_views_that_begin_anywhere(layout: LayerLayout) -> None:
    """Another one would be compiled for them, perhaps while a CUDA graph is captured."""
    shape, dtype = shape_of(layout.group_size, 2, 64, 64), torch.bfloat16
    case = random_case(layout, shape, 3, 1, 81).to("cpu", dtype)
    assert case.rotation is not None
    rotations = block_starts(case.rotation, layout)
    decoding = DecodeLayer(case.parameters, dtype, torch.device("cpu"))
    ranges = KeyRanges.of_lengths(torch.full((4,), 80, dtype=torch.int32))
    basis = torch.zeros(layout.group_size * 64, layout.key_rank, dtype=dtype)
    found = []
    for start in (0, 1):
        key, value = (side[:, start:] for side in (case.key, case.value))
        own = KeyRanges(*(of[start : start + 3] for of in (ranges.first, ranges.end, ranges.begin, ranges.until)))
        assert [x.data_ptr() % 16 == 0 for x in (key, own.begin)] == [start == 0] * 2
        with recorded(90) as launched:
            decode_attention(case.query[:, :, 0], key, value, decoding, own, rotations)
            append(
                torch.zeros(3, 80, shape.num_kv_heads, 64, dtype=dtype),
                torch.zeros(3, 80, layout.value_rank, dtype=dtype), layout, shape, key_basis=basis,
                rotation=case.rotation, out=(key[:, None, :80], value[:, None, :80]),
                scale=zero_scale(layout, torch.device("cpu")),
            )  # fmt: skip
        found.append([(variant.name, variant.source.hash()) for variant in launched])
    names = ["absorb", "decode", "join", "append"]
    assert [name for name, _ in found[0]] == names
    assert found[0] == found[1]


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_is_three_launches(exact: bool) -> None:
    """Of a layer in blocks: coding is part of appending, and so are storing the step's token exactly, and absorbing."""
    subject = named_subjects()["llama3-8b-128x2"]
    subject = with_exact(subject) if exact else subject
    layout, shape, dtype, device = subject.layout, subject.shape, subject.dtype, torch.device("cpu")
    stored = step_tensors(layout, shape, dtype, torch.zeros)
    names = "query_basis", "key_constant", "output_basis", "value_constant"
    parameters = AttentionParameters(layout, shape, 1.0, **{name: stored.get(name) for name in names})
    rotation = torch.zeros(128, 128), torch.zeros(128, 128)
    rows = torch.zeros(2, 64, layout.row_bytes(2)[0], dtype=torch.uint8), torch.zeros(2, 64, 0, dtype=torch.uint8)
    query, key = (torch.zeros(2, 1, heads, 128, dtype=dtype) for heads in (32, 8))
    value = key if exact else torch.zeros(2, 1, layout.value_rank, dtype=dtype)
    ranges, slots, fill = KeyRanges.of_lengths(torch.full((2,), 64).int()), None, None
    if layout.exact is not None:
        slots = random_slots(layout.exact, shape, 2, 64, dtype, torch.Generator())
        fill = SlotsToFill(slots.key, slots.value, layout.exact.first, layout.exact.newest, 63, 0)
    bases = {name: stored.get(name) for name in ("key_basis", "key_shift", "value_basis", "value_shift")}
    decoding, starts = DecodeLayer(parameters, dtype, device), block_starts(rotation, layout)
    absorbing = Absorbing.of(decoding, ranges, slice(0, 2), blocks_of(decoding, 64), starts)
    with recorded(90) as launched:
        append(
            key, value, layout, shape, query=query, rotation=rotation, scale=zero_scale(layout, device), fill=fill,
            absorb=absorbing, **bases,
        )  # fmt: skip
        decode_attention(
            query[:, 0], *rows, decoding, ranges, starts, exact=slots, attended=ranges, absorbing=absorbing
        )
    assert [variant.name for variant in launched] == ["append", "decode", "finish" if exact else "join"]


EVERY_EXACT = [(name, arch) for name in EXACT for arch in (80, 90)]


@pytest.mark.parametrize(
    ("name", "arch"),
    [case if case == ("llama3-8b-128x2", 90) else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY_EXACT],
)
def test_a_layer_with_exact_tokens_takes_few_instructions_more(name: str, arch: int) -> None:
    """A step of 8 x 32768 keys: joining alone takes 0.28 to 0.46 a key; finishing rows of three heads, exact tokens in
    pages, 1.0 to 1.21.
    """
    (layer,) = count_layers([with_exact(gpu_subjects()[name])], [arch])
    assert [kernel.error for kernel in layer.kernels] == [None] * len(layer.kernels)
    (finish,) = (kernel for kernel in layer.kernels if kernel.name.startswith("finish") and kernel.instructions_per_key)
    assert finish.spilled_bytes == 0
    assert 0.2 < finish.instructions_per_key < 1.25
    (append,) = (kernel for kernel in layer.kernels if kernel.name == "append, 1 tokens")
    assert append.spilled_bytes <= MOST_SPILLED_BYTES


@pytest.mark.parametrize(
    "layout",
    mostly_nightly(
        [
            layer(KeyForm(64), 2, CodedRow(n4=48)),
            layer(KeyForm(64), 1, (CodedRow(n4=32), CodedRow(n4=32))),
            layer(KeyForm(64), 1, (NumberRow(20), NumberRow(28))),
        ],
        lambda layout: layout.kind == "apart",  # the kernels of others are compiled above
    ),
    ids=["joint", "apart", "numbers"],
)
def test_a_step_behind_a_mask_with_holes_compiles(layout: LayerLayout) -> None:
    """A static cache always has a mask; the interpreter does not see that a variable changes its type in a loop."""
    shape, dtype = shape_of(layout.group_size, 2, 64, 64), torch.bfloat16
    case = random_case(layout, shape, 2, 1, 80).to("cpu", dtype)
    assert case.rotation is not None
    mask = torch.ones(2, 1, 1, 80, dtype=torch.bool)
    mask[:, :, :, 40:60] = False
    ranges = ranges_of(mask, (2, 1, 80), torch.device("cpu"))
    decoding = DecodeLayer(case.parameters, dtype, torch.device("cpu"))
    rotations = block_starts(case.rotation, layout)
    with recorded(90) as launched:
        decode_attention(case.query[:, :, 0], case.key, case.value, decoding, ranges, rotations)
    (decode,) = (variant for variant in launched if variant.kind == "decode")
    registers, _ = usage(decode.compile().asm["cubin"])
    assert registers <= 255
