"""What kernel_config.json says of a model that nobody has tuned: classes, blocks, specialisations and tiles by rule.

`rotor export` writes it, `rotor validate` compares with it, and checkpoints without the file are run by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rotor.format.columns import Columns
from rotor.format.kernel_config import Blocks, ClassKernels, KernelConfig, LayerKernels, Schedule, SlowPlanes, serving
from rotor.format.layout import AttentionShape, LayerLayout

from .schedule import balanced_row_blocks
from .widths import padded

SCHEDULE: Schedule = "stream"

MAX_BODIES = {"post": 3, "none": 3, "pre": 2}
"""Distinct widths that one decode kernel is compiled for; a narrower part runs in a wider body, its columns masked.
More would cost registers, since those of all bodies are kept."""

TILE_BYTES = 16 << 10
"""Latents of a decode tile, at most: three of them in flight on each of two or more programs an SM cover the memory's
latency."""


def default_config(layouts: Sequence[LayerLayout], shape: AttentionShape) -> KernelConfig:
    """The kernel configuration of a model, by rule."""
    return KernelConfig(SCHEDULE, tuple(default_layer(layout, shape.head_dim) for layout in layouts))


@lru_cache(maxsize=4096)
def default_layer(layout: LayerLayout, head_dim: int) -> LayerKernels:
    """The launches of a layer: its classes with row blocks balanced over them, and what decoding is compiled for.

    Source: FDC section 5.3 for the balance.
    """
    classes = list(layout.classes())
    ranks = [(c.qk_rank, c.v_rank) for c in classes]
    blocks = [Blocks(*pair) for pair in balanced_row_blocks(ranks)]
    rebuilt: list[Blocks | None] = [None] * len(classes)
    if layout.domain == "pre":
        rebuilt = [Blocks(*pair) for pair in balanced_row_blocks([(head_dim, v_rank) for _, v_rank in ranks])]
    # Several widths in each of several bodies would take too many registers where keys are rebuilt.
    most = 1 if layout.coded and layout.domain == "pre" else MAX_BODIES[layout.domain]
    bodies = _bodies(sorted(set(ranks), reverse=True), most)
    return LayerKernels(
        tuple(
            ClassKernels(c.count, c.qk_rank, c.v_rank, b, r, _counts(c.qk_columns), _counts(c.v_columns))
            for c, b, r in zip(classes, blocks, rebuilt, strict=True)
        ),
        bodies,
        _tile(bodies, layout.domain == "pre"),
    )


SLOW_TILE = 128
"""Keys of a decode tile where slow planes are interpolated: of fewer frequencies, registers hold more keys."""


def with_slow_planes(kernels: LayerKernels, slow: SlowPlanes | None) -> LayerKernels:
    """The same launches with slow planes interpolated in decoding."""
    return kernels if slow is None else replace(kernels, tile=SLOW_TILE, slow_planes=slow)


def _counts(columns: Columns | None) -> tuple[int, ...] | None:
    return None if columns is None else columns.counts


def _tile(bodies: tuple[tuple[int, int], ...], pre: bool) -> int:
    """Keys of a decode tile, in 16 bits; in `pre` at most, as registers bound it there (`decode.tile_sizes`)."""
    widest = max(qk for qk, _ in bodies), max(v for _, v in bodies)
    if pre:
        return 64
    tile = 128
    while tile > 16 and tile * sum(widest) * 2 > TILE_BYTES:
        tile //= 2
    return tile


def _bodies(widths: list[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """At most `count` widths, each pair of `widths` being served by one that is no narrower; fewest padded columns.

    Pairs are merged into the larger of both, cheapest first.
    """
    bodies = sorted({(padded(qk), padded(v)) for qk, v in widths}, reverse=True)
    while len(bodies) > count:

        def waste(pair: tuple[int, int], among: list[tuple[int, int]] = bodies) -> int:
            (qk, v), (other_qk, other_v) = among[pair[0]], among[pair[1]]
            return 2 * (max(qk, other_qk) + max(v, other_v)) - qk - v - other_qk - other_v

        first, second = min(((i, j) for i in range(len(bodies)) for j in range(i)), key=waste)
        merged = tuple(max(a, b) for a, b in zip(bodies[first], bodies[second], strict=True))
        kept = [b for i, b in enumerate(bodies) if i not in (first, second)]
        bodies = sorted({*kept, (merged[0], merged[1])}, reverse=True)
    used = {serving(tuple(bodies), *width) for width in widths}
    return tuple(body for body in bodies if body in used)
