"""Counting instructions in machine code: written by hand, and of small kernels with loops that are known."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rotor.bench.sass import CountError, Graph, Instruction, Loop, disassemble, usage

ARCHS = (90, 80)


def by_hand(*lines: str) -> Graph:
    """Machine code, a line each: an instruction, or a label with a colon."""
    return Graph(
        "\n".join(line if line.endswith(":") else f"        /*0000*/                   {line} ;" for line in lines)
    )


NESTED = (
    "S2R R0, SR_TID.X",
    ".L_x_1:",
    "LDG.E R2, desc[UR4][R2.64]",
    ".L_x_2:",
    "HMMA.16816.F32.BF16 R4, R8, R12, R4",
    "@!P1 FADD R1, R1, R1",
    "@P0 BRA `(.L_x_2)",
    "BRA.U UP0, `(.L_x_1)",
    "EXIT",
    ".L_x_9:",
    "BRA `(.L_x_9)",
)


def test_nested_loops_by_hand():
    found = by_hand(*NESTED).count([Loop(10, (Loop(4),))])
    assert found.loops == ((2, 10), (3, 40))
    assert found.instructions == 1 + 10 * 2 + 40 * 3 + 1
    assert found.pipes == {"control": 1 + 10 + 40 + 1, "global": 10, "tensor": 40, "fma": 40}


@pytest.mark.parametrize("declared", [[], [Loop(2)], [Loop(2), Loop(3)], [Loop(2, (Loop(2), Loop(2)))]])
def test_other_loops_than_declared(declared):
    with pytest.raises(CountError, match="loops in a row, declared are"):
        by_hand(*NESTED).count(declared)


BRANCHES = (
    ".L_x_1:",
    "@P0 BRA `(.L_x_2)",
    "FADD R1, R1, R1",
    "FADD R1, R1, R1",
    "FADD R1, R1, R1",
    "BRA `(.L_x_3)",
    ".L_x_2:",
    "IADD3 R1, R1, R1, RZ",
    ".L_x_3:",
    "@P1 EXIT",
    "@P2 BRA `(.L_x_1)",
    "EXIT",
)


@pytest.mark.parametrize(("shorter", "each"), [(False, 1 + 4 + 2), (True, 1 + 1 + 2)])
def test_ways_through_a_loop(shorter, each):
    assert by_hand(*BRANCHES).count([Loop(5, shorter=shorter)]).loops == ((each, 5),)


def test_a_kernel_that_ends_inside_of_its_loop():
    graph = by_hand("MOV R0, R1", ".L_x_1:", "FADD R1, R1, R1", "@P0 EXIT", "FADD R1, R1, R1", "BRA `(.L_x_1)")
    assert graph.count([Loop(5)]).loops == ((4, 5),)
    assert graph.count([Loop(5)]).instructions == 1 + 5 * 4


def test_clones_of_a_loop_are_one():
    graph = by_hand(
        "@P0 BRA `(.L_x_2)",
        ".L_x_1:",
        "FADD R1, R1, R1",
        "@P1 BRA `(.L_x_1)",
        "BRA `(.L_x_3)",
        ".L_x_2:",
        "FMUL R1, R1, R1",
        "FMUL R1, R1, R1",
        "@P1 BRA `(.L_x_2)",
        ".L_x_3:",
        "IADD3 R1, R1, R1, RZ",
        "@P1 BRA `(.L_x_3)",
        "EXIT",
    )
    found = graph.count([Loop(10), Loop(100)])
    assert found.instructions == 1 + 10 * 3 + 100 * 2 + 1
    assert found.loops == ((2, 10), (3, 10), (2, 100))


def test_rounds_made_one():
    """Four loads a round, and what is left of the rounds one by one."""
    graph = by_hand(
        ".L_x_1:",
        *["LDG.E R2, desc[UR4][R2.64]"] * 4,
        "@P0 BRA `(.L_x_1)",
        ".L_x_2:",
        "LDG.E R2, desc[UR4][R2.64]",
        "@P0 BRA `(.L_x_2)",
        "EXIT",
    )
    assert graph.count([Loop(100)]).pipes == {"global": 100, "control": 25 + 1}
    assert graph.count([Loop(100), Loop(3)]).pipes == {"global": 403, "control": 104}
    known = by_hand(".L_x_1:", *["LDG.E R2, desc[UR4][R2.64]"] * 4, "@P0 BRA `(.L_x_1)", "EXIT")
    assert known.count([Loop(100, holds=("global", 1))]).pipes == {"global": 100, "control": 25 + 1}


def test_a_called_routine_counts_at_each_call():
    graph = by_hand(
        "CALL.REL.NOINC `($__internal_0_$div)",
        "MOV R0, R1",
        "CALL.REL.NOINC `($__internal_0_$div)",
        "EXIT",
        "$__internal_0_$div:",
        "MUFU.RCP R1, R1",
        "RET.REL.NODEC R2 `(kernel)",
    )
    assert graph.count().instructions == 4 + 2 * 2


def test_a_call_inside_of_the_kernel_is_a_jump():
    graph = by_hand(
        ".L_x_1:", "FADD R1, R1, R1", "@P0 CALL.REL.NOINC `(.L_x_2)", "BRA `(.L_x_1)", ".L_x_2:", "STG.E R1, R2", "EXIT"
    )
    found = graph.count([Loop(10)])
    assert found.loops == ((3, 10),)
    assert found.pipes == {"fma": 10, "control": 21, "global": 1}


def test_what_cannot_be_followed():
    with pytest.raises(CountError, match="target is not known"):
        by_hand("BRX R2 -0x100", "EXIT")
    with pytest.raises(CountError, match="entered in two places"):
        by_hand("@P0 BRA `(.L_b)", ".L_a:", "NOP", ".L_b:", "@P0 BRA `(.L_a)", "EXIT").count()


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("HMMA.16816.F32.BF16", "tensor"),
        ("HGMMA.64x8x16.F32.BF16", "tensor"),
        ("FFMA", "fma"),
        ("IMAD.MOV.U32", "fma"),
        ("HFMA2.MMA.BF16_V2", "fma"),
        ("LOP3.LUT", "alu"),
        ("F2FP.BF16.F32.PACK_AB", "alu"),
        ("MUFU.EX2", "mufu"),
        ("LDGSTS.E.BYPASS.128", "global"),
        ("LDGDEPBAR", "control"),
        ("LDSM.16.M88.4", "shared"),
        ("SHFL.BFLY", "exchange"),
        ("STL.64", "local"),
        ("UIADD3", "uniform"),
        ("ULDC.64", "constant"),
        ("BAR.SYNC.DEFER_BLOCKING", "control"),
    ],
)
def test_pipes(opcode, pipe):
    assert Instruction(opcode, "", "", None).pipe == pipe


@triton.jit
def nested(values, out, blocks, BLOCK: tl.constexpr, TILE: tl.constexpr, UNROLLED: tl.constexpr, MASKED: tl.constexpr):
    places = tl.arange(0, 32)
    total = tl.zeros((32,), tl.float32)
    for block in range(blocks):
        scale = tl.load(values + block)
        for tile in tl.range(0, BLOCK, TILE, num_stages=1):
            for part in tl.static_range(UNROLLED):
                place = (block * BLOCK + tile + part) * 32 + places
                x = tl.load(values + place, mask=place < MASKED, other=0.0) if MASKED else tl.load(values + place)
                total = total * x + scale
    tl.store(out + places, total)


def compiled(arch: int, **constants: int) -> Graph:
    names = ("BLOCK", "TILE", "UNROLLED", "MASKED")
    types = {"values": "*fp32", "out": "*fp32", "blocks": "i32"}
    source = ASTSource(
        fn=nested,
        signature=types | dict.fromkeys(names, "constexpr"),
        constexprs={name: constants.get(name, 0) for name in names},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 1})
    registers, spilled = usage(kernel.asm["cubin"])
    assert 8 <= registers <= 255
    assert spilled == 0
    return Graph(disassemble(kernel.asm["cubin"]))


@pytest.mark.parametrize("arch", ARCHS)
def test_unrolled_by_the_compiler(arch):
    """One load a round and one a block, whatever the compiler makes of the loops."""
    declared = [Loop(10, (Loop(1024, holds=("global", 1)),))]
    found = compiled(arch, BLOCK=1 << 20, TILE=1 << 10, UNROLLED=1).count(declared)
    (_, blocks), (each, rounds) = found.loops
    assert (blocks, rounds) == (10, 10240)
    assert 2 < each < 4  # load, multiply-add, and a share of what a loop takes
    assert found.pipes["global"] == pytest.approx(10240, rel=0.01)


@pytest.mark.parametrize("arch", ARCHS)
def test_predicated(arch):
    """A load that a mask keeps from happening takes its place, and so does the comparison."""
    declared = [Loop(10, (Loop(1024, holds=("global", 4)),))]
    sizes = {"BLOCK": 1 << 20, "TILE": 1 << 10, "UNROLLED": 4}
    plain, masked = (compiled(arch, MASKED=masked, **sizes).count(declared) for masked in (0, 1 << 24))
    assert plain.pipes["global"] == pytest.approx(4 * 10240, rel=0.01)
    assert masked.pipes["global"] == pytest.approx(4 * 10240, rel=0.01)
    assert masked.loops[1][0] >= plain.loops[1][0] + 4


@pytest.mark.parametrize("arch", ARCHS)
def test_loop_of_one_round_vanishes(arch):
    """The loop of blocks is left, in rounds of several and a loop for the rest of them."""
    found = compiled(arch, BLOCK=8, TILE=8, UNROLLED=2).count([Loop(1000)])
    assert len(found.loops) == 1
    assert found.pipes["global"] == pytest.approx(3 * 1000, rel=0.02)
