"""Pure scheduling arithmetic shared by the kernel configuration and the kernels: no tensors, no GPU."""

from __future__ import annotations

ROW_BLOCK = 64
COLUMN_BLOCK = 64
TILE = 16
"""The tensor cores' granularity: widths and blocks are multiples of it."""

REGISTERS_PER_SM = 65536
"""32-bit registers of one SM (sm_80 to sm_100)."""


def work_per_key(qk_rank: int, v_rank: int) -> int:
    """d_sum = d_qk + d_v + 1: multiply-adds per query row and key, the softmax counted as one.

    Source: FDC section 5.3.
    """
    return qk_rank + v_rank + 1


def balanced_row_blocks(widths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(B_r, B_c) for each (d_qk, d_v), so that every row block is about the same work.

    The widest takes ROW_BLOCK rows; another takes d_sum_max / d_sum as many, rounded up to a multiple of TILE. Where
    the accumulators then exceed the registers of an SM, B_c is halved, down to TILE.

    Source: FDC section 5.3 (prefill) and section 6.1.
    """
    largest = max(work_per_key(*width) for width in widths)
    blocks = []
    for qk_rank, v_rank in widths:
        rows = ROW_BLOCK * largest / work_per_key(qk_rank, v_rank)
        row_block = -int(-rows // TILE) * TILE
        column_block = COLUMN_BLOCK
        # float32 output and score accumulators, 16-bit query rows.
        while column_block > TILE and row_block * (v_rank + column_block + qk_rank / 2) > REGISTERS_PER_SM:
            column_block //= 2
        blocks.append((row_block, column_block))
    return blocks
