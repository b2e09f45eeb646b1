"""Cycles of pipes in machine code that is written by hand."""

from __future__ import annotations

import pytest
from gpu.cycles import busy, resident_warps, shared_bytes, weights
from gpu.sass import Graph, Instruction, Loop, parse


def instruction(opcode: str, operands: str = "") -> Instruction:
    return Instruction(opcode, "", operands, None)


@pytest.mark.parametrize(
    ("opcode", "moved"),
    [
        ("LDSM.16.M88.4", 512), ("LDSM.16.MT88.2", 256), ("LDSM.16.M88", 128), ("LDS.128", 512), ("STS.U16", 128),
        ("LDGSTS.E.BYPASS.128", 512), ("LDG.E.64", 256), ("STL", 128), ("SHFL.BFLY", 128), ("FFMA", 0), ("LDC", 0),
    ],
)  # fmt: skip
def test_bytes_that_a_warp_moves(opcode, moved):
    assert shared_bytes(instruction(opcode)) == moved


def test_a_product_of_four_warps_reads_its_operands_once():
    by_register = instruction("HGMMA.64x16x16.F32.BF16", "R24, R4, gdesc[UR4], R24")
    both = instruction("HGMMA.64x16x16.F32.BF16", "R24, gdesc[UR4], R24")
    assert shared_bytes(by_register) == 2 * 16 * 16 / 4
    assert weights(90)["tensor"](both) == 16 / 2 / 4


@pytest.mark.parametrize(
    ("arch", "opcode", "pipe", "cycles"),
    [
        (80, "HMMA.16816.F32.BF16", "tensor", 8), (90, "HMMA.16816.F32.BF16", "tensor", 4 / 0.62),
        (80, "FFMA", "float", 2), (90, "FFMA", "float", 1), (90, "IMAD.MOV.U32", "float", 2),
        (90, "MUFU.EX2", "special", 8), (90, "LOP3.LUT", "integer", 2), (90, "F2FP.BF16.F32.PACK_AB", "integer", 2),
    ],
)  # fmt: skip
def test_each_instruction_has_one_pipe(arch, opcode, pipe, cycles):
    found = {name: weight(instruction(opcode)) for name, weight in weights(arch).items()}
    assert {name: own for name, own in found.items() if own} == {"issue": 1 / 4, pipe: pytest.approx(cycles / 4)}
    for other in ("UIADD3", "BRA", "BAR.SYNC.DEFER_BLOCKING"):
        assert [name for name, weight in weights(arch).items() if weight(instruction(other))] == ["issue"]


@pytest.mark.parametrize(
    ("of", "warps"),
    [((90, 255, 13856, 1), 8), ((90, 255, 13856, 1, 4), 4), ((90, 168, 9504, 2), 12), ((90, 255, 100352, 4), 8),
     ((80, 255, 100352, 4), 4), ((90, 16, 0, 1), 64)],
)  # fmt: skip
def test_warps_that_an_sm_holds(of, warps):
    """By registers, launches, registers of fewer, and shared memory."""
    assert resident_warps(*of) == warps


CODE = """
.L_x_1:
        /*0000*/                   LDS.128 R4, [R2] ;        /* 0x0000000002047984 */
                                                             /* 0x000fe20000000c00 */
        /*0010*/                   FFMA R4, R4, R5, R6 ;     /* 0x0000000504047223 */
                                                             /* 0x000fc80000000006 */
        /*0020*/               @P0 BRA `(.L_x_1) ;           /* 0xfffffffc00008947 */
                                                             /* 0x000fea000383ffff */
        /*0030*/                   EXIT ;                    /* 0x000000000000794d */
                                                             /* 0x000fea0003800000 */
"""


def test_a_loop_and_what_its_warps_wait():
    assert [each.stall for each in parse(CODE)[0]] == [1, 4, 5, 5]
    found = busy(Graph(CODE), [Loop(10)], 90, 8)
    assert found["shared memory"] == 10 * 512 / 128
    assert found["issue"] == (10 * 3 + 1) / 4
    assert found["float"] == 10 / 4
    assert found["waiting"] == (10 * (1 + 4 + 5) + 5) / 8
    assert busy(Graph(CODE), [Loop(10)], 120, 8) == {}
