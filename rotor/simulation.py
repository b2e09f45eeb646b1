"""How evenly a decode step's attention loads the SMs of a GPU under each schedule: arithmetic, nothing is run.

A layer is one launch: a task for each group of KV heads of each sequence, made of tiles of keys. A tile costs what
rotor.cost predicts for it, the longer of reading its latents and of multiplying with them. The step takes the most
loaded SM's time, layer after layer; the floor is the mean load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint import config_of
from .cost import decode_flops_per_token, group_bytes_per_token
from .devices import Device, find_device
from .errors import CheckpointError, UsageError
from .families import attention_shape
from .integration import METHOD, RotorConfig
from .kernels.schedule import equal_slices, greedy_assignment
from .layout import AttentionShape, LayerLayout

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
    """One schedule over all layers.

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
    """A task for each group of each sequence; groups of a sequence one after the other, as the packed rows hold them.

    Args:
        lengths: keys of each sequence.
        device: rates of the whole GPU, of which each of `sms` has its share.
    """
    tiles, costs = [], []
    for length in lengths:
        for group in layout.groups:
            size = len(group.kv_heads)
            read = group_bytes_per_token(group.qk_rank, group.v_rank, element_bytes) / device.bandwidth_bytes_per_s
            flops = decode_flops_per_token(
                layout.domain, size, shape.heads_per_kv, shape.head_dim, group.qk_rank, group.v_rank
            )
            tiles.append(-(-length // TILE))
            costs.append(TILE * sms * max(read, flops / device.matmul_flops_per_s))
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
    """The balance of each of SCHEDULES for one decode step of a batch.

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


def simulate_folder(
    folder: Path, lengths: Sequence[int], sms: int, device: str, device_file: Path | None = None
) -> list[Balance]:
    """`simulate` for a compressed checkpoint; of an elastic one all columns, the widest profile that it can be cut to.

    Raises:
        CheckpointError: not a folder that `rotor export` wrote. RecipeError: no such device.
    """
    config = config_of(folder)
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") != METHOD:
        raise CheckpointError(f"{folder}: not a compressed checkpoint.", "Give a folder that `rotor export` wrote.")
    shape = attention_shape(config)
    layouts = RotorConfig(**stored).layouts(shape)
    rates = find_device(device, None if device_file is None else str(device_file))
    return simulate(layouts, shape, lengths, rates, sms, (config.dtype or torch.float32).itemsize)


def parse_lengths(text: str) -> list[int]:
    """`32768`, `200,16000`, `8x32768,64x100`: keys of each sequence.

    Raises:
        UsageError: not of that form.
    """
    lengths: list[int] = []
    for item in text.split(","):
        count, times, length = item.strip().rpartition("x")
        if not length.isdigit() or (times and not count.isdigit()):
            raise UsageError(f"--lengths {text}: {item.strip()!r} is not a number of tokens.", "Example: 8x32768,200")
        lengths += [int(length)] * int(count or 1)
    return lengths
