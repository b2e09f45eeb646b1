"""The papers' schedules and equal slices, for the simulator: arithmetic, no tensors, no GPU."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

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


def greedy_assignment(costs: Sequence[float], workers: int) -> list[list[int]]:
    """The papers' decode schedule: longest task first, each to the worker with the least work so far.

    Args:
        costs: of each task, e.g. s_kv d_sum. workers: SMs.
    Returns:
        For each worker the indices of its tasks, in the order in which it gets them. Ties go to the lower index.

    Source: FDC section 5.3 and figure 8; ZACK section 5.3 and figure 12.
    """
    tasks: list[list[int]] = [[] for _ in range(workers)]
    loads = [(0.0, worker) for worker in range(workers)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, worker = heapq.heappop(loads)
        tasks[worker].append(index)
        heapq.heappush(loads, (load + costs[index], worker))
    return tasks


def makespan(costs: Sequence[float], workers: int) -> float:
    """When the last of `workers` is through, if each takes the next task, in order, as soon as it is free."""
    ends = [0.0] * workers
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def row_block_costs(seq_len: int, past: int, rows: int, pack: int, others: int) -> list[float]:
    """Keys that each row block of a causal prefill meets, the longest first, `others` times each."""
    blocks = -(-seq_len * pack // rows)
    ends = [past + min(seq_len, -(-(block + 1) * rows // pack)) for block in reversed(range(blocks))]
    return [float(end) for end in ends for _ in range(others)]


def equal_slices(tiles: Sequence[int], tile_costs: Sequence[float], workers: int) -> list[list[tuple[int, int, int]]]:
    """Stream-K: the tiles of all tasks in one line, cut into a contiguous slice of equal cost for each worker.

    A tile belongs to the worker in whose share its middle lies, so that no load is off by more than half a tile on
    either side.

    Args:
        tiles: number of each task's tiles. tile_costs: of one of them.
    Returns:
        For each worker its pieces: (task, first tile, number of tiles).

    Source: stream-K, arXiv 2301.03598, on the tiles of ragged heads.
    """
    share = sum(n * cost for n, cost in zip(tiles, tile_costs, strict=True)) / workers
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
    start = 0.0
    for task, (count, cost) in enumerate(zip(tiles, tile_costs, strict=True)):
        tile = 0
        while tile < count:
            worker = min(workers - 1, int((start + (tile + 0.5) * cost) / share))
            # Up to the first tile whose middle lies in the next worker's share.
            last = count if worker == workers - 1 else math.ceil((share * (worker + 1) - start) / cost - 0.5)
            until = min(count, max(tile + 1, last))
            pieces[worker].append((task, tile, until - tile))
            tile = until
        start += count * cost
    return pieces
