"""The work of each compiled kernel at a load, and the time and share of its floor that follow: nothing is run.

What a kernel does is counted from the layer that it serves and from the constants that it was compiled for; what of it
is on an SM from its registers, shared memory and copies. The rule that makes seconds of both is `roofline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..format.columns import Columns
from ..format.kernel_config import DEFAULT_SLICES, SlowPlanes
from ..format.layout import AttentionShape, GroupClass, LayerLayout
from ..kernels.occupancy import GRID_PROGRAMS
from ..kernels.schedule import row_block_costs
from .cost import DecodeStep, layer_work
from .devices import Device
from .roofline import Residency, Work


@dataclass(frozen=True)
class Load:
    """Sequences in the batch, new tokens of each, and cached ones before them."""

    batch_size: int
    new_tokens: int
    past: int = 0

    @property
    def keys(self) -> int:
        """Of a sequence, its new ones among them."""
        return self.past + self.new_tokens


@dataclass(frozen=True)
class Launch:
    """A kernel as it is compiled, for a layer: its name's first word, its constants, and bytes of a number."""

    kind: str
    constants: Mapping[str, Any]
    layout: LayerLayout
    shape: AttentionShape
    element_bytes: int

    def classes(self) -> Iterator[GroupClass]:
        """The classes that a kernel serves: of a prefill those whose widths are among its constants, else all."""
        if self.kind != "prefill":
            yield from self.layout.classes()
            return
        rebuilt = self.layout.domain == "pre" and not self.constants["PRE"]
        for cls in self.layout.classes():
            if cls.v_rank == self.constants["V"] and (rebuilt or cls.qk_rank == self.constants["QK"]):
                yield cls

    def side_bytes(self) -> tuple[float, float]:
        """Bytes of a key and of a value of a group, on the average."""
        qk_bytes, v_bytes = self.layout.read_bytes(self.element_bytes)
        return qk_bytes / len(self.layout.groups), v_bytes / len(self.layout.groups)


@dataclass(frozen=True)
class Floor:
    """What is predicted of a kernel at a load, over the layers that launch it.

    memory_bytes: read and written once. l2_bytes: beyond these, out of the L2 cache. flops: of matrix products as the
    kernel does them. programs_per_sm, flight_bytes: of an SM; None where a kernel streams, with no loop that waits.
    limit: what takes longest: memory, matrix, l2, vector or waiting. floor_seconds: of the least work.
    """

    batch_size: int
    new_tokens: int
    past: int
    launches: int
    memory_bytes: float
    l2_bytes: float
    flops: float
    programs_per_sm: int
    flight_bytes: float | None
    limit: str
    seconds: float
    floor_seconds: float
    share: float


def predicted_floor(
    launches: list[Launch], load: Load, device: Device, programs: int, flight_bytes: Mapping[str, int]
) -> Floor | None:
    """The floor of one compiled kernel in all layers that launch it; None for one whose work is not counted.

    Args:
        programs: that an SM holds, by its registers and shared memory.
        flight_bytes: of the kernel's arguments, as `kernels.ahead.Resources` has them.
    """
    works = [kernel_work(launch, load, device.sms or 1) for launch in launches]
    counted = [work for work in works if work is not None]
    if len(counted) < len(works) or not works:
        return None
    first = launches[0]
    if first.kind == "decode" and first.constants["SCHEDULE"] == "stream":
        programs = min(GRID_PROGRAMS, programs)
    residencies = [compiled_residency(launch, programs, flight_bytes) for launch in launches]
    seconds = sum(work.cache_seconds(device, r) for work, r in zip(counted, residencies, strict=True))
    least = sum(work.floor_seconds(device) for work in counted)
    whole = sum(counted, Work())
    limits = whole.limits(device)
    limit = max(limits, key=lambda name: limits[name])
    flight = residencies[0]
    return Floor(
        load.batch_size,
        load.new_tokens,
        load.past,
        len(launches),
        whole.cache_bytes,
        whole.l2_bytes,
        whole.cache_flops + whole.tile_flops,
        programs,
        None if flight is None else programs * flight.flight_bytes,
        limit if seconds <= 1.001 * sum(work.cache_seconds(device) for work in counted) else "waiting",
        seconds,
        least,
        least / max(seconds, 1e-30),
    )


def compiled_residency(launch: Launch, programs: int, flight_bytes: Mapping[str, int]) -> Residency | None:
    """What of a kernel that goes through keys is on an SM; None of others, or where no program fits."""
    if launch.kind not in ("decode", "prefill", "few") or not programs:
        return None
    tile, sides = launch.constants["TILE"], launch.side_bytes()
    if "key" in flight_bytes and "value" in flight_bytes:
        return Residency(programs, flight_bytes["key"] + flight_bytes["value"], True)
    asked = [flight_bytes.get(name, tile * size) for name, size in zip(("key", "value"), sides, strict=True)]
    return Residency.in_turn(programs, list(zip(sides, asked, strict=True)))


def kernel_work(launch: Launch, load: Load, sms: int) -> Work | None:
    """Of one launch; None for a kernel that is not known here."""
    count = WORKS.get(launch.kind)
    return None if count is None else count(launch, load, sms)


def _decode(launch: Launch, load: Load, sms: int) -> Work:
    step, constants = DecodeStep(load.keys, load.batch_size, launch.element_bytes), launch.constants
    nodes = () if constants.get("STEP") else constants.get("NODES")
    slow = SlowPlanes(constants["FAST"], constants["BLOCK"], len(nodes)) if nodes else None
    work = layer_work(launch.layout, launch.shape, step, slow)
    return Work(
        cache_bytes=work.cache_bytes,
        cache_flops=work.cache_flops,
        tile_flops=work.tile_flops,
        l2_bytes=work.l2_bytes,
        vector_flops=work.vector_flops,
    )


def _combine(launch: Launch, load: Load, sms: int) -> Work:
    """Partial results come out of the L2 cache; each slice ends one, and so does each unit but the last."""
    rows = launch.layout.group_size * launch.shape.heads_per_kv
    units = load.batch_size * len(launch.layout.groups)
    width = launch.layout.v_width / len(launch.layout.groups)
    partial = (GRID_PROGRAMS * sms + units - 1) * rows * width
    written = units * rows * (width * launch.element_bytes + 4)
    return Work(cache_bytes=written, l2_bytes=4 * partial * (1 + 1 / width), vector_flops=2 * partial)


def _prefill(launch: Launch, load: Load, sms: int) -> Work | None:
    """As `_row_blocks`; some of those of a prompt have a kernel of their own, and are counted once."""
    return None if launch.constants["SPLIT"] > 1 else _row_blocks(launch, load, sms)


def _row_blocks(launch: Launch, load: Load, sms: int) -> Work:
    """Each row block meets the keys up to its last query; keys are read once from memory, and again from L2."""
    constants, head_dim, element_bytes = launch.constants, launch.shape.head_dim, launch.element_bytes
    rebuilt, pre = launch.layout.domain == "pre" and not constants["PRE"], constants["PRE"]
    met = sum(row_block_costs(load.new_tokens, load.past, constants["ROWS"], constants["PACK"], load.batch_size))
    pairs = load.batch_size * (load.new_tokens * (load.new_tokens + 1) / 2 + load.new_tokens * load.past)
    keys, queries = load.batch_size * load.keys, load.batch_size * load.new_tokens
    whole = Work()
    for cls in launch.classes():
        units = cls.count * constants["HEADS"]
        width = head_dim if pre or rebuilt else cls.qk_rank
        both = width + cls.v_rank
        rebuilding = 2 * cls.qk_rank * head_dim if pre else 0
        key_bytes, value_bytes = _class_bytes(cls, element_bytes)
        if rebuilt:
            key_bytes = head_dim * element_bytes * constants["HEADS"]
        stored = cls.count * (key_bytes + value_bytes)
        rows_read = queries * units * constants["PACK"] * both * element_bytes
        read_by_unit = (key_bytes / (constants["HEADS"] if rebuilt else 1)) + value_bytes
        basis = cls.qk_rank * head_dim * element_bytes / constants["TILE"] if pre else 0
        least = units * (2 * constants["PACK"] * both * pairs + rebuilding * keys)
        done = units * met * (2 * constants["ROWS"] * both + rebuilding)
        whole += Work(
            cache_bytes=keys * stored + rows_read,
            cache_flops=least,
            tile_flops=max(0.0, done - least),
            l2_bytes=max(0.0, units * met * (read_by_unit + basis) - keys * stored),
        )
    return whole


def _class_bytes(cls: GroupClass, element_bytes: int) -> tuple[float, float]:
    """Of a key and of a value of one group."""

    def size(columns: Columns | None, rank: int) -> int:
        return rank * element_bytes if columns is None else columns.row_bytes(element_bytes)

    return size(cls.qk_columns, cls.qk_rank), size(cls.v_columns, cls.v_rank)


def _rebuild(launch: Launch, load: Load, sms: int) -> Work:
    layout, head_dim = launch.layout, launch.shape.head_dim
    keys = load.batch_size * load.keys
    rebuilt = keys * launch.shape.num_kv_heads * head_dim * launch.element_bytes
    flops = 2 * keys * head_dim * layout.group_size * layout.qk_width
    return Work(cache_bytes=keys * layout.row_bytes(launch.element_bytes)[0] + rebuilt, cache_flops=flops)


def _rotation(launch: Launch, load: Load, sms: int) -> Work:
    """Queries and keys in, latents of both out, both bases once; of codes values in too, and words out of both."""
    layout, shape = launch.layout, launch.shape
    tokens = load.batch_size * load.new_tokens
    rows = layout.group_size * shape.heads_per_kv
    read = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    written = (rows + 1) * layout.qk_width
    basis = layout.group_size * shape.head_dim * layout.qk_width
    flops = 2 * tokens * shape.head_dim * layout.qk_width * (rows + layout.group_size)
    read_and_written: float = (tokens * (read + written) + 2 * basis) * launch.element_bytes
    if layout.coded:
        values_less_keys = (layout.v_width - layout.qk_width) * launch.element_bytes
        read_and_written += tokens * (values_less_keys + sum(layout.row_bytes(launch.element_bytes)))
    return Work(cache_bytes=read_and_written, cache_flops=flops)


def _append(launch: Launch, load: Load, sms: int) -> Work:
    """Keys and values: numbers in, words out."""
    layout = launch.layout
    numbers = (layout.qk_width + (0 if layout.joint else layout.v_width)) * launch.element_bytes
    of_token = numbers + sum(layout.row_bytes(launch.element_bytes))
    return Work(cache_bytes=load.batch_size * load.new_tokens * of_token)


def _ranges(launch: Launch, load: Load, sms: int) -> Work:
    """A byte of the mask a key; three numbers a query out, and with words a bit a key."""
    rows = load.batch_size * load.new_tokens
    bits = rows * load.keys / 8 if launch.constants["WORDS"] else 0.0
    return Work(cache_bytes=rows * (load.keys + 12) + bits)


def _tiles(launch: Launch, load: Load, sms: int) -> Work:
    """First and end of each sequence's keys in, tiles before it out."""
    return Work(cache_bytes=8.0 * (2 * load.batch_size + 1))


def _plan(launch: Launch, load: Load, sms: int) -> Work:
    """First and end of each query's keys in; at most as many slices as there are programs out, of three numbers (a few
    times as many where groups differ in width).
    """
    queries = load.batch_size * load.new_tokens
    tasks = -(-load.new_tokens * launch.constants["PACK"] // launch.constants["ROWS"]) * load.batch_size
    return Work(cache_bytes=8.0 * queries + 12.0 * DEFAULT_SLICES * sms + 4.0 * (tasks + 1))


def _join(launch: Launch, load: Load, sms: int) -> Work:
    """At most as many partial results as there are programs come out of the L2 cache, of ROWS rows each."""
    width = launch.layout.v_width / len(launch.layout.groups)
    partial = DEFAULT_SLICES * sms * launch.constants["ROWS"] * width
    heads = len(launch.layout.groups) * launch.layout.group_size * launch.shape.heads_per_kv
    written = load.batch_size * load.new_tokens * heads * (width * launch.element_bytes + 4)
    return Work(cache_bytes=written, l2_bytes=4 * partial * (1 + 1 / width), vector_flops=2 * partial)


def _sums(launch: Launch, load: Load, sms: int) -> Work:
    """Of columns, or their log-sum-exp: one product of all pairs of queries and keys, causal where there is no mask."""
    heads, width = launch.constants["HEADS"], launch.constants["ROW"]
    pre, size = launch.layout.domain == "pre", launch.layout.group_size
    units = sum(cls.count * (size if pre else 1) for cls in launch.layout.classes() if pre or cls.qk_rank == width)
    queries, keys = load.batch_size * load.new_tokens, load.batch_size * load.keys
    pairs: float = queries * load.keys
    if launch.constants["CAUSAL"]:
        pairs = load.batch_size * (load.new_tokens * (load.new_tokens + 1) / 2 + load.new_tokens * load.past)
    numbers = units * width * (heads * queries + keys)
    results = 4 * units * (heads * queries + keys)
    masked = queries * load.keys if launch.constants["MASK"] else 0
    return Work(
        cache_bytes=numbers * launch.element_bytes + results + masked,
        cache_flops=2 * width * units * heads * pairs,
        vector_flops=4 * units * heads * pairs,
    )


WORKS: dict[str, Callable[[Launch, Load, int], Work | None]] = {
    "decode": _decode,
    "combine": _combine,
    "prefill": _prefill,
    "few": _row_blocks,
    "rebuild": _rebuild,
    "rotation": _rotation,
    "append": _append,
    "ranges": _ranges,
    "words": _ranges,
    "tiles": _tiles,
    "plan": _plan,
    "join": _join,
    "log": _sums,
    "column": _sums,
}
"""By the first word of a variant's name."""

STEPS = {"decode", "combine", "ranges", "tiles"}
PROMPTS = {"prefill", "rebuild", "words", "log", "column"}
"""Kernels of decoding alone, and of prompts alone; others run in both."""

FEW = {"few", "plan", "join"}
"""Kernels that run where the keys of few queries are split."""

SHARED = {"ranges", "words", "tiles", "plan"}
"""Kernels that run once for all layers of a step; in traced code for each."""
