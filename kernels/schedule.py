"""Pure scheduling arithmetic shared by the kernel configuration and the kernels: no tensors, no GPU."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

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


PIECES = 4
"""Into how many a row block of the last round is cut."""

PIECE_COST = 1.6
"""Cost of PIECES pieces over that of the whole: fewer rows than 64 do without the fast matrix products of sm_90. An
assumption, not measured."""

MOST_ROUNDS = 8
"""With more rounds the last one is too small a share to care for."""


@lru_cache(maxsize=4096)
def last_round(seq_len: int, past: int, rows: int, pack: int, others: int, workers: int) -> tuple[int, bool]:
    """How many row blocks of a prefill are launched whole, the longest first, and whether the rest is cut into PIECES.

    Tasks fill the GPU in rounds of `workers`. Those of the last round, if it is not full, are cut into pieces of fewer
    rows and launched after all others, where that ends sooner.

    Args:
        seq_len, past: queries of a sequence, and keys before them.
        rows, pack: of a row block, and query heads that share its keys; rows are (position, head) pairs.
        others: tasks of the same length: heads or groups times sequences.
        workers: SMs times the programs that one holds.

    Source: FDC section 5.3, ZACK section 5.3; they let the pieces be any multiple of 16 rows.
    """
    tasks = -(-seq_len * pack // rows) * others
    whole = tasks - tasks % workers
    if whole == tasks or tasks > MOST_ROUNDS * workers:
        return tasks, False
    costs = row_block_costs(seq_len, past, rows, pack, others)
    cut = redistributed_makespan(costs, workers) < makespan(costs, workers)
    return (whole, True) if cut else (tasks, False)


def keys_are_split(tasks: int, units: int, classes: int, programs: int) -> bool:
    """Whether the keys of a prefill's row blocks are split over programs, in one launch for all classes of a layer:
    where the launches of single classes would on the average fill half of the GPU at most.

    Args:
        tasks: row blocks times sequences. units: groups, or heads, of all classes, that each have these tasks.
        programs: that the GPU is to have.
    """
    return 0 < 2 * tasks * units <= programs * classes


def row_block_costs(seq_len: int, past: int, rows: int, pack: int, others: int) -> list[float]:
    """Keys that each row block of a causal prefill meets, the longest first, `others` times each."""
    blocks = -(-seq_len * pack // rows)
    ends = [past + min(seq_len, -(-(block + 1) * rows // pack)) for block in reversed(range(blocks))]
    return [float(end) for end in ends for _ in range(others)]


def redistributed_makespan(costs: Sequence[float], workers: int) -> float:
    """`makespan` with the tasks of the last, incomplete round cut into pieces, which begin when all others are done."""
    whole = len(costs) - len(costs) % workers
    pieces = [cost * PIECE_COST / PIECES for cost in costs[whole:] for _ in range(PIECES)]
    return makespan(costs[:whole], workers) + makespan(pieces, workers)


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
