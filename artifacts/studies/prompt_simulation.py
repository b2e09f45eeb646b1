"""Simulate how evenly a prompt's attention loads the SMs of a GPU: arithmetic, nothing is run.

In a prompt a layer is one launch: a task for each block of B_r query rows of each query head of each sequence, which
goes through the keys B_c at a time. A task costs B_r s_kv (d_qk + d_v + 1), where d_qk and d_v are its head's ranks.

Source: FDC and ZACK, sections 5.3 and 6.1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from simulation import Balance, Tasks, check_load, equal_slices

from rotor.checkpoint.layout import AttentionShape, LayerLayout

ROWS = 64
"""B_r, query rows of a task where all heads have the same ranks."""

KEYS = 64
"""B_c, keys that a task reads at a time."""

STEP = 16
"""Rows of a block are a multiple of this, by the tensor cores."""


@dataclass(frozen=True)
class RowBlock:
    """A task: some query rows of a head over the keys that they see. width: d_qk + d_v + 1 of the head."""

    rows: int
    keys: int
    width: int

    @property
    def cost(self) -> float:
        """Work of the task, with its rows filled up to a multiple of STEP."""
        return float(_up(self.rows) * self.keys * self.width)


@dataclass(frozen=True)
class Prompt:
    """The attention of one layer to a batch of prompts.

    widths: d_qk + d_v + 1 of each query head. lengths: tokens of each sequence. causal: a block reads the keys up to
    its last row's; otherwise all, as the papers count.
    """

    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    causal: bool

    @classmethod
    def of_layer(cls, layout: LayerLayout, shape: AttentionShape, lengths: Sequence[int], causal: bool) -> Prompt:
        """The heads of a layer with the ranks of their groups."""
        widths = [
            group.key.rank + group.values.rank + 1
            for group in layout.groups
            for _ in range(len(group.kv_heads) * shape.heads_per_kv)
        ]
        return cls(tuple(widths), tuple(lengths), causal)

    def blocks(self, rows_of: Callable[[int], int]) -> Iterator[RowBlock]:
        """The tasks, sequence by sequence and head by head.

        Args:
            rows_of: B_r of a head by its width.
        """
        for length in self.lengths:
            for width in self.widths:
                rows = rows_of(width)
                for start in range(0, length, rows):
                    end = min(start + rows, length)
                    yield RowBlock(end - start, end if self.causal else length, width)

    @property
    def work(self) -> float:
        """Work of the whole layer, in tasks of ROWS rows."""
        return sum(block.cost for block in self.blocks(lambda width: ROWS))


def in_rounds(prompt: Prompt, sms: int) -> tuple[list[float], int]:
    """ROWS rows a task whatever the head's ranks, dealt out in rounds of all SMs, as the papers picture a GPU.

    Returns:
        The load of each SM, and the number of tasks; as all schedules here.
    """
    tasks = list(prompt.blocks(lambda width: ROWS))
    return [sum(task.cost for task in tasks[sm::sms]) for sm in range(sms)], len(tasks)


def equal_rows(prompt: Prompt, sms: int) -> tuple[list[float], int]:
    """ROWS rows a task whatever the head's ranks; the next goes to the SM that is free first, as GPUs do."""
    return _in_order(list(prompt.blocks(lambda width: ROWS)), [0.0] * sms)


def rows_by_ranks(prompt: Prompt, sms: int) -> tuple[list[float], int]:
    """B_r by ranks: d_sum^max / d_sum^i times ROWS for head i, up to a multiple of STEP, so that tasks weigh alike."""
    return _in_order(_by_ranks(prompt), [0.0] * sms)


def papers(prompt: Prompt, sms: int) -> tuple[list[float], int]:
    """The papers' schedule: B_r by ranks, and the tasks of the last round cut into equal work for all SMs.

    The last round has N_last tasks. Each SM should get wl = 1/N_SM sum_i B_r^i d_sum^i of them, so task i is cut into
    blocks of wl / d_sum^i rows, up to a multiple of STEP; each goes to the SM with the least work so far.
    """
    tasks = _by_ranks(prompt)
    last = len(tasks) % sms
    loads, _ = _in_order(tasks[: len(tasks) - last], [0.0] * sms)
    remaining = tasks[len(tasks) - last :]
    share = sum(block.rows * block.width for block in remaining) / sms
    cut = [
        RowBlock(min(rows, block.rows - start), block.keys, block.width)
        for block in remaining
        for rows in [_up(math.ceil(share / block.width))]
        for start in range(0, block.rows, rows)
    ]
    loads, parts = _in_order(cut, loads)
    return loads, len(tasks) - last + parts


def slices(prompt: Prompt, sms: int) -> tuple[list[float], int]:
    """Stream-K: the tiles of all tasks, ROWS rows by KEYS keys, in one line cut into slices of equal cost."""
    blocks = list(prompt.blocks(lambda width: ROWS))
    counts = [-(-block.keys // KEYS) for block in blocks]
    costs = [block.cost / count for block, count in zip(blocks, counts, strict=True)]
    parts = equal_slices(Tasks(tuple(counts), tuple(costs)), sms)
    return [sum(count * costs[task] for task, count in mine) for mine in parts], sum(map(len, parts))


SCHEDULES: dict[str, Callable[[Prompt, int], tuple[list[float], int]]] = {
    "rounds": in_rounds,
    "none": equal_rows,
    "rows": rows_by_ranks,
    "papers": papers,
    "stream": slices,
}


def simulate_prompts(
    layouts: Sequence[LayerLayout], shape: AttentionShape, lengths: Sequence[int], sms: int, causal: bool
) -> list[Balance]:
    """Simulate each of SCHEDULES for a batch of prompts: the most loaded SM's work over an even share, all layers.

    Not simulated: what larger blocks save in reading keys again, and what their registers cost.

    Args:
        lengths: tokens of each prompt. causal: see Prompt.
    Raises:
        UsageError: as `simulate`.
    """
    check_load(lengths, sms)
    layers = [Prompt.of_layer(layout, shape.layer(index), lengths, causal) for index, layout in enumerate(layouts)]
    even = sum(prompt.work for prompt in layers) / sms
    balances = []
    for name, schedule in SCHEDULES.items():
        found = [schedule(prompt, sms) for prompt in layers]
        balances.append(Balance(name, sum(max(loads) for loads, _ in found) / even, sum(parts for _, parts in found)))
    return balances


def _by_ranks(prompt: Prompt) -> list[RowBlock]:
    widest = max(prompt.widths)
    return list(prompt.blocks(lambda width: _up(math.ceil(ROWS * widest / width))))


def _in_order(tasks: Sequence[RowBlock], before: Sequence[float]) -> tuple[list[float], int]:
    """Give tasks out in order, each to the SM with the least work so far."""
    loads = list(before)
    heapq.heapify(loads)
    for task in tasks:
        heapq.heapreplace(loads, loads[0] + task.cost)
    return loads, len(tasks)


def _up(rows: int) -> int:
    return -(-rows // STEP) * STEP
