"""How the decode kernel cuts the work of a group, and what of it is on an SM: read from the kernels' own rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..format.columns import Columns
from ..format.kernel_config import SlowPlanes
from ..format.layout import Domain, GroupLayout, LayerLayout
from ..kernels.decode.tile_sizes import decode_config, decode_shared_bytes, rebuilding_steps
from ..kernels.defaults import default_layer, with_slow_planes
from ..kernels.gpu import HOPPER
from ..kernels.layer_table import LayerParts, layer_parts
from ..kernels.occupancy import GRID_PROGRAMS, programs_per_sm
from .roofline import Residency

Latent = float | Columns
"""One side of a group: a rank, of numbers in the model's dtype, or columns by bits."""

ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Tiling:
    """The decode kernel for one group; see `kernels/layer_table.py` and `kernels/decode/tile_sizes.py`.

    parts: each reads the group's latents. rows: query rows of a part's tile, padded. keys: of a tile.
    heads: times that rebuilding the keys of a group loads the latents again, 0 where they stay in registers.
    programs: of the kernel on an SM, as far as is known before it is compiled. ahead: tiles that are asked for before
        they are needed, 0 where a program waits for each. columns: of a key latent that are loaded at a time, 0 where
        that is all of them. slow: which planes are interpolated; None where keys are rebuilt whole.
    step: positions of the blocks whose queries are absorbed, no key being rebuilt; 0 where keys are.
    node_rows: of queries that are absorbed at a time, padded, for `block` keys. joint: values come with the keys.
    """

    parts: int
    rows: int
    keys: int
    heads: int
    programs: int
    ahead: int
    columns: int
    slow: SlowPlanes | None = None
    node_rows: int = 0
    block: int = 0
    step: int = 0
    joint: bool = False

    @classmethod
    def of(
        cls,
        domain: Domain,
        group_size: int,
        heads_per_kv: int,
        qk: Latent,
        v: Latent,
        head_dim: int = 128,
        slow: SlowPlanes | None = None,
        rope_block: int = 1,
        joint: bool = False,
    ) -> Tiling:
        """By the kernels' rules for 16-bit models on Hopper; ranks that are no whole number are rounded. Of a joint
        latent `v` is `qk`.
        """
        return _tiling(domain, group_size, heads_per_kv, _whole(qk), _whole(v), head_dim, slow, rope_block, joint)

    @classmethod
    def of_kernel(cls, parts: LayerParts, config: dict[str, Any], groups: int) -> Tiling:
        """Of a layer's decode kernel: its parts, what `decode_config` chose for them, and the layer's groups."""
        programs = programs_per_sm(config["num_warps"], decode_shared_bytes(config, ELEMENT_BYTES), HOPPER.capability)
        count, columns = len(parts.table) // groups, config["COLUMNS"]
        return cls(
            parts=count,
            rows=config["TILE_ROWS"],
            keys=config["TILE"],
            heads=rebuilding_steps(parts, config) * count if columns else 0,
            programs=max(1, min(GRID_PROGRAMS, programs)),
            ahead=tiles_ahead(config),
            columns=columns,
            slow=parts.slow,
            node_rows=config["NODE_ROWS"],
            block=config["BLOCK"],
            step=config["STEP"],
            joint=config["JOINT"],
        )

    def residency(self, qk_bytes: float, v_bytes: float) -> Residency:
        """Of the kernel, before it is compiled, on latents of so many bytes a key."""
        v_bytes = 0.0 if self.joint else v_bytes
        if self.ahead:
            return Residency(self.programs, self.ahead * self.keys * (qk_bytes + v_bytes), True)
        of_keys = min(qk_bytes, self.columns * ELEMENT_BYTES) if self.columns else qk_bytes
        return Residency.in_turn(self.programs, [(qk_bytes, self.keys * of_keys), (v_bytes, self.keys * v_bytes)])


def tiles_ahead(config: dict[str, Any]) -> int:
    """Tiles that the decode kernel asks for before it needs them, by its constants.

    Where keys are rebuilt the loop over heads keeps the compiler from pipelining the loop over tiles: there a tile is
    carried (AHEAD), or none.
    """
    if config["PRE"] and not config["STEP"]:
        return 1 if config["AHEAD"] else 0
    return int(config["num_stages"]) - 1


@lru_cache(maxsize=1 << 16)
def _tiling(
    domain: Domain,
    group_size: int,
    heads_per_kv: int,
    qk: int | Columns,
    v: int | Columns,
    head_dim: int,
    slow: SlowPlanes | None,
    rope_block: int,
    joint: bool,
) -> Tiling:
    heads = tuple(range(group_size))
    if isinstance(qk, Columns) and isinstance(v, Columns):
        group = GroupLayout.coded(heads, qk, None if joint else v)
    else:
        assert isinstance(qk, int)
        assert isinstance(v, int)
        group = GroupLayout(heads, qk, v, joint=joint)
    layout = LayerLayout(domain, domain == "none", (group,), rope_block)
    parts = layer_parts(layout, heads_per_kv, head_dim, with_slow_planes(default_layer(layout, head_dim), slow))
    config = decode_config(parts, heads_per_kv, ELEMENT_BYTES, head_dim if domain == "pre" else 0)
    return Tiling.of_kernel(parts, config, groups=1)


def _whole(latent: Latent) -> int | Columns:
    """A latent that a layout may have."""
    if isinstance(latent, Columns):
        return latent if latent.rank else Columns(n2=16)
    return max(1, round(latent))
