"""Simulate how evenly attention loads the SMs of a GPU under each schedule: arithmetic, nothing is run.

In a decode step a layer is one launch: a task for each group of KV heads of each sequence, made of tiles of keys. A
tile costs the longer of reading its latents and of issuing its instructions. The step takes the most loaded SM's time,
layer after layer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rotor.calibration.prediction.devices import Device
from rotor.calibration.prediction.instructions import group_instructions
from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.errors import UsageError

KEYS = 64
"""Keys in a tile of decoding."""

Part = tuple[int, int]
"""A task, and how many of its tiles."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of a layer: tiles of each, and predicted seconds of one tile on one SM."""

    tiles: tuple[int, ...]
    tile_seconds: tuple[float, ...]

    @property
    def seconds(self) -> list[float]:
        return [n * cost for n, cost in zip(self.tiles, self.tile_seconds, strict=True)]


def layer_tasks(
    layout: LayerLayout, shape: AttentionShape, lengths: Sequence[int], device: Device, sms: int, element_bytes: int
) -> Tasks:
    """Make a task for each group of each sequence; those of a sequence in the order of the packed rows.

    Args:
        lengths: keys of each sequence. device: rates of the whole GPU, of which each of `sms` has its share.
    """
    key_seconds = [
        max(
            device.read_seconds(sum(latent.row_bytes(element_bytes) for latent in group.latents)),
            device.issue_seconds(group_instructions(layout, group, shape)),
        )
        for group in layout.groups
    ]
    tiles = [-(-length // KEYS) for length in lengths for _ in key_seconds]
    return Tasks(tuple(tiles), tuple(KEYS * sms * seconds for _ in lengths for seconds in key_seconds))


def unsplit(tasks: Tasks, sms: int) -> list[list[Part]]:
    """Give tasks out in order: the next goes to the SM that is free first."""
    return _to_the_least_loaded(tasks, sms, range(len(tasks.tiles)))


def longest_first(tasks: Tasks, sms: int) -> list[list[Part]]:
    """The papers' decode schedule: longest task first, each to the SM with the least work so far. Not split.

    It evens out a batch of many sequences of different lengths or ranks. With fewer tasks than SMs (one sequence) each
    has an SM of its own in any order, and the rest idle.

    Source: FDC section 5.3 and figure 8; ZACK section 5.3 and figure 12.
    """
    seconds = tasks.seconds
    return _to_the_least_loaded(tasks, sms, sorted(range(len(seconds)), key=lambda i: (-seconds[i], i)))


def _to_the_least_loaded(tasks: Tasks, sms: int, order: Sequence[int]) -> list[list[Part]]:
    parts: list[list[Part]] = [[] for _ in range(sms)]
    loads = [(0.0, sm) for sm in range(sms)]
    for task in order:
        load, sm = loads[0]
        parts[sm].append((task, tasks.tiles[task]))
        heapq.heapreplace(loads, (load + tasks.seconds[task], sm))
    return parts


def equal_slices(tasks: Tasks, sms: int) -> list[list[Part]]:
    """Stream-K: the tiles of all tasks in one line, cut into a contiguous slice of equal cost for each SM.

    A tile belongs to the SM in whose share its middle lies, so that no load is off by more than half a tile on either
    side.

    Source: stream-K, arXiv 2301.03598, on the tiles of ragged heads.
    """
    share = sum(tasks.seconds) / sms
    parts: list[list[Part]] = [[] for _ in range(sms)]
    start = 0.0
    for task, (count, cost) in enumerate(zip(tasks.tiles, tasks.tile_seconds, strict=True)):
        tile = 0
        while tile < count:
            sm = min(sms - 1, int((start + (tile + 0.5) * cost) / share))
            # Up to the first tile whose middle lies in the next SM's share.
            last = count if sm == sms - 1 else math.ceil((share * (sm + 1) - start) / cost - 0.5)
            until = min(count, max(tile + 1, last))
            parts[sm].append((task, until - tile))
            tile = until
        start += count * cost
    return parts


SCHEDULES: dict[str, Callable[[Tasks, int], list[list[Part]]]] = {
    "none": unsplit,
    "lpt": longest_first,
    "stream": equal_slices,
}


@dataclass(frozen=True)
class Balance:
    """Balance of one schedule over all layers.

    largest_over_mean: time of the step over what it would take if every SM were loaded alike.
    parts: partial results that a step writes, over all layers; as many as tasks where none is split.
    """

    schedule: str
    largest_over_mean: float
    parts: int


def check_load(lengths: Sequence[int], sms: int) -> None:
    """Raises UsageError unless there are sequences, all with tokens, and SMs."""
    if not lengths or min(lengths) < 1 or sms < 1:
        raise UsageError(
            f"lengths {list(lengths)[:8]} on {sms} SMs: expected positive numbers.", "Example: --lengths 8x32768"
        )


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
    check_load(lengths, sms)
    layers = [layer_tasks(layout, shape, lengths, device, sms, element_bytes) for layout in layouts]
    balances = []
    for name, schedule in SCHEDULES.items():
        parts = [schedule(tasks, sms) for tasks in layers]
        loads = [
            [sum(count * tasks.tile_seconds[task] for task, count in mine) for mine in each]
            for tasks, each in zip(layers, parts, strict=True)
        ]
        mean = sum(map(sum, loads)) / sms
        parts_written = sum(len(mine) for each in parts for mine in each)
        balances.append(Balance(name, sum(map(max, loads)) / mean, parts_written))
    return balances
