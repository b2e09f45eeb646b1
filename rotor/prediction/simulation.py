"""Simulate how evenly attention loads the SMs of a GPU under each schedule: arithmetic, nothing is run.

In a decode step a layer is one launch: a task for each group of KV heads of each sequence, made of tiles of keys. A
tile costs the longer of reading its latents and of issuing its instructions. The step takes the most loaded SM's time,
layer after layer; the floor is the mean load.

In a prefill as FDC has it the row blocks of all groups of a layer are one launch, and one costs its FLOPs: blocks of
as many rows for all groups, or B_r rows, fewer the wider a group is, so that all take as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..format.layout import AttentionShape, LayerLayout
from .devices import Device
from .instructions import group_instructions
from .schedule import (
    ROW_BLOCK,
    balanced_row_blocks,
    equal_slices,
    greedy_assignment,
    makespan,
    row_block_costs,
    work_per_key,
)

TILE = 64
"""Keys in a tile."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of a layer: tiles of each, and predicted seconds of one tile on one SM."""

    tiles: tuple[int, ...]
    tile_seconds: tuple[float, ...]

    @property
    def seconds(self) -> list[float]:
        return [n * cost for n, cost in zip(self.tiles, self.tile_seconds, strict=True)]


@dataclass(frozen=True)
class Balance:
    """Balance of one schedule over all layers.

    largest_over_mean: time of the step over what it would take if every SM were loaded alike.
    parts: partial results that a step writes, over all layers; as many as tasks where none is split.
    loads: of the SMs in the layer that is balanced worst, over their mean.
    worst_layer: its index.
    """

    schedule: str
    largest_over_mean: float
    parts: int
    loads: tuple[float, ...]
    worst_layer: int


def layer_tasks(
    layout: LayerLayout, shape: AttentionShape, lengths: Sequence[int], device: Device, sms: int, element_bytes: int
) -> Tasks:
    """Make a task for each group of each sequence; those of a sequence in the order of the packed rows.

    Args:
        lengths: keys of each sequence.
        device: rates of the whole GPU, of which each of `sms` has its share.
    """
    key_seconds = [
        max(
            device.read_seconds(sum(latent.row_bytes(element_bytes) for latent in group.latents)),
            device.issue_seconds(group_instructions(layout, group, shape)),
        )
        for group in layout.groups
    ]
    tiles, costs = [], []
    for length in lengths:
        tiles += [-(-length // TILE)] * len(key_seconds)
        costs += [TILE * sms * seconds for seconds in key_seconds]
    return Tasks(tuple(tiles), tuple(costs))


def _in_order(tasks: Tasks, sms: int) -> tuple[list[float], int]:
    """Unsplit: the GPU gives the next task to the SM that is free first."""
    loads = [0.0] * sms
    for seconds in tasks.seconds:
        loads[loads.index(min(loads))] += seconds
    return loads, len(tasks.tiles)


def _greedy(tasks: Tasks, sms: int) -> tuple[list[float], int]:
    seconds = tasks.seconds
    return [sum(seconds[i] for i in mine) for mine in greedy_assignment(seconds, sms)], len(seconds)


def _sliced(tasks: Tasks, sms: int) -> tuple[list[float], int]:
    pieces = equal_slices(tasks.tiles, tasks.tile_seconds, sms)
    loads = [sum(count * tasks.tile_seconds[task] for task, _, count in mine) for mine in pieces]
    return loads, sum(len(mine) for mine in pieces)


SCHEDULES: dict[str, Callable[[Tasks, int], tuple[list[float], int]]] = {
    "none": _in_order,
    "lpt": _greedy,
    "stream": _sliced,
}
"""none: unsplit, in order. lpt: the papers' greedy schedule, unsplit. stream: equal slices, split anywhere."""


def simulate(
    layouts: Sequence[LayerLayout],
    shape: AttentionShape,
    lengths: Sequence[int],
    device: Device,
    sms: int,
    element_bytes: int = 2,
) -> list[Balance]:
    """Simulate each of SCHEDULES for one decode step of a batch.

    Args:
        lengths: keys of each sequence of the batch.
    Raises:
        UsageError: no sequence, one without keys, or no SM.
    """
    if not lengths or min(lengths) < 1 or sms < 1:
        raise UsageError(
            f"lengths {list(lengths)[:8]} on {sms} SMs: expected positive numbers.", "Example: --lengths 8x32768"
        )
    layers = [layer_tasks(layout, shape, lengths, device, sms, element_bytes) for layout in layouts]
    balances = []
    for name, schedule in SCHEDULES.items():
        results = [schedule(tasks, sms) for tasks in layers]
        means = [sum(loads) / sms for loads, _ in results]
        ratios = [max(loads) / mean for (loads, _), mean in zip(results, means, strict=True)]
        worst = ratios.index(max(ratios))
        balances.append(
            Balance(
                schedule=name,
                largest_over_mean=sum(max(loads) for loads, _ in results) / sum(means),
                parts=sum(parts for _, parts in results),
                loads=tuple(load / means[worst] for load in results[worst][0]),
                worst_layer=worst,
            )
        )
    return balances


@dataclass(frozen=True)
class PrefillBalance:
    """A prefill over all layers: time over what it would take if every SM were loaded alike.

    equal: row blocks of ROW_BLOCK rows for every group. balanced: of B_r rows. Both with the longest first.
    """

    equal: float
    balanced: float


def simulate_prefill(
    layouts: Sequence[LayerLayout], shape: AttentionShape, chunk: int, past: int, batch_size: int, sms: int
) -> PrefillBalance:
    """Simulate a prefill of `chunk` new tokens of each sequence after `past` cached ones.

    Raises:
        UsageError: no new token, sequence or SM.

    Source: FDC section 5.3.
    """
    if chunk < 1 or past < 0 or batch_size < 1 or sms < 1:
        raise UsageError(
            f"a prefill of {chunk} tokens on {sms} SMs: expected positive numbers.", "Example: --chunk 512"
        )
    mean = equal = balanced = 0.0
    for layout in layouts:
        pack = layout.group_size * shape.heads_per_kv
        widths = [(group.key.width, group.values.width) for group in layout.groups]

        def costs(rows: list[int], widths: list[tuple[int, int]] = widths, pack: int = pack) -> list[float]:
            found = []
            for count, width in zip(rows, widths, strict=True):
                keys = row_block_costs(chunk, past, count, pack, batch_size)
                found += [count * work_per_key(*width) * met for met in keys]
            return sorted(found, reverse=True)

        alike = costs([ROW_BLOCK] * len(widths))
        mean += sum(alike) / sms
        equal += makespan(alike, sms)
        balanced += makespan(costs([rows for rows, _ in balanced_row_blocks(widths)]), sms)
    return PrefillBalance(equal / mean, balanced / mean)
