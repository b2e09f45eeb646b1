"""Counting instructions in machine code that is written by hand; test_precompile counts that of kernels."""

from __future__ import annotations

import pytest
from gpu.sass import CountError, Graph, Loop


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
    assert found == 1 + 10 * (1 + 4 * 3 + 1) + 1


@pytest.mark.parametrize("declared", [[], [Loop(2)], [Loop(2), Loop(3)], [Loop(2, (Loop(2), Loop(2)))]])
def test_other_loops_than_declared(declared):
    with pytest.raises(CountError, match="loops in a row, declared are"):
        by_hand(*NESTED).count(declared)


def test_of_branches_the_longer_way():
    graph = by_hand(
        ".L_x_1:",
        "@P0 BRA `(.L_x_2)",
        *["FADD R1, R1, R1"] * 3,
        "BRA `(.L_x_3)",
        ".L_x_2:",
        "IADD3 R1, R1, R1, RZ",
        ".L_x_3:",
        "@P1 EXIT",
        "@P2 BRA `(.L_x_1)",
        "EXIT",
    )
    assert graph.count([Loop(5)]) == 5 * (4 + 3) + 1


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
    assert graph.count() == 4 + 2 * 2


def test_what_cannot_be_followed():
    with pytest.raises(CountError, match="target is not known"):
        by_hand("BRX R2 -0x100", "EXIT")
    with pytest.raises(CountError, match="entered in two places"):
        by_hand("@P0 BRA `(.L_b)", ".L_a:", "NOP", ".L_b:", "@P0 BRA `(.L_a)", "EXIT").count([Loop(1)])
