"""Which rotary planes decoding before RoPE need not rebuild: those that hardly turn within a block of keys.

Within a block the turn of a plane of frequency w, exp(i w t), is interpolated in the key's place t from its values at a
few places, the nodes, by Lagrange's polynomials l_m(t). A logit's part of these planes is then a sum over nodes of
l_m(t) times the product of the latent with the query that was turned back to node m and taken into the latent's basis:
once a block in place of a rebuilt key for each of its keys. `decode/absorbed.py` does it.

Arithmetic alone, in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rotor.format.kernel_config import MOST_NODES, REBUILT_STEP, SLOW_BLOCKS, SlowPlanes

from .widths import padded

TOLERANCE = {2: 2.0**-11, 4: 2.0**-21}
"""The largest error of a cosine or sine, by bytes of a number: what rounding to float16 adds to one near 1, and for
float32 four times that."""


@lru_cache(maxsize=64)
def node_places(nodes: int, block: int) -> tuple[int, ...]:
    """The nodes of a block: Chebyshev's, rounded to places of keys."""
    return tuple(round((block - 1) / 2 * (1 - math.cos((2 * m + 1) * math.pi / (2 * nodes)))) for m in range(nodes))


def node_weights(nodes: int, block: int) -> Tensor:
    """Lagrange's polynomials at each place of a block, [block, nodes]: what each node weighs there."""
    places = torch.tensor(node_places(nodes, block), dtype=torch.float64)
    place = torch.arange(block, dtype=torch.float64)
    weights = torch.ones(block, nodes, dtype=torch.float64)
    for m in range(nodes):
        others = torch.cat([places[:m], places[m + 1 :]])
        weights[:, m] = ((place[:, None] - others) / (places[m] - others)).prod(dim=1)
    return weights


def turn_error(frequencies: Sequence[float], slow: SlowPlanes) -> float:
    """The largest error of a cosine or sine of the planes that are not rebuilt, anywhere in a block.

    frequencies: radians by which a key's plane turns from one place to the next, fastest first.
    """
    rest = torch.tensor(frequencies[slow.rebuilt :], dtype=torch.float64)
    if not len(rest):
        return 0.0
    turns = torch.arange(slow.block, dtype=torch.float64)[:, None] * rest
    weights, nodes = node_weights(slow.nodes, slow.block), list(node_places(slow.nodes, slow.block))
    return max(float((weights @ exact[nodes] - exact).abs().max()) for exact in (turns.cos(), turns.sin()))


def choices(frequencies: Sequence[float], tolerance: float) -> Iterator[SlowPlanes]:
    """For so many planes rebuilt and each size of block the fewest nodes within the tolerance, where there are any.

    Planes must come fastest first, as RoPE has them; without that there is none.
    """
    if any(slower > faster for faster, slower in itertools.pairwise(frequencies)):
        return
    for rebuilt in range(REBUILT_STEP, len(frequencies), REBUILT_STEP):
        for block in SLOW_BLOCKS:
            for nodes in range(1, MOST_NODES + 1):
                slow = SlowPlanes(rebuilt, block, nodes)
                if turn_error(frequencies, slow) <= tolerance:
                    yield slow
                    break


ABSORBED_COLUMNS = 64
"""Of a latent for which the queries of a head are absorbed at a time."""


def absorbing_constants(
    slow: SlowPlanes | None, heads_per_kv: int, planes: int, width: int, at_once: int, tile_rows: int
) -> dict[str, Any]:
    """Constants of the decode kernel: FAST planes of a head rebuilt, NODES of a BLOCK of keys, the WIDTH of absorbed
    queries, and how they are made: ABSORBED_COLUMNS and PLANES at a time, NODE_ROWS of them for a KV head; KEPT_ROWS in
    all.

    planes: of a head. width: of the widest latent, padded. at_once: planes of which queries are absorbed at a time.
    tile_rows: query rows of a tile. Without slow planes all are rebuilt.
    """
    unstepped = {"STEP": 0, "TILE_NODES": 1, "CHUNK": 0, "JOINT": False}  # of `decode.stepped`
    if slow is None:
        of_queries = dict.fromkeys(
            ("BLOCK", "WIDTH", "ABSORBED_COLUMNS", "PLANES", "NODE_ROWS", "KEPT_ROWS", "BASIS_STAGES"), 0
        )
        return {"FAST": padded(planes), "NODES": (), **of_queries, **unstepped}
    return {
        "FAST": slow.rebuilt,
        "NODES": node_places(slow.nodes, slow.block),
        "BLOCK": slow.block,
        "WIDTH": width,
        "ABSORBED_COLUMNS": min(ABSORBED_COLUMNS, width),
        "PLANES": at_once,
        "NODE_ROWS": padded(slow.nodes * heads_per_kv),
        "KEPT_ROWS": slow.nodes * tile_rows,
        "BASIS_STAGES": 2,
        **unstepped,
    }
