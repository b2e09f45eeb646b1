"""Cosines and sines of RoPE by index in the cache, made once for the layers that share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..format.layout import KeyForm
from ..kernels.rotary import Rotation, when_read
from .positions import PositionCheck

TABLE_ROWS = 1024
"""Rows by which a table of cosines and sines grows."""


class RotaryTable:
    """Cosines and sines by index in the cache, from the model's own rotary embedding, shared by the layers of a type.

    Holds the embedding without registering it as a submodule: it stays where the model has it.

    Args:
        layer_type: passed to the embedding, where it takes one.

    depends_on_length: whether frequencies do, so that a table holds only for the positions it was made for. Otherwise
        positions may count from the first key that the cache still holds, since only differences matter.
    """

    def __init__(self, rotary: nn.Module, layer_type: str | None = None) -> None:
        self._rotary = rotary
        self._arguments = () if layer_type is None else (layer_type,)
        kinds: Any = rotary.rope_type
        kind = kinds if layer_type is None else kinds[layer_type]
        self.depends_on_length = kind == "longrope" or "dynamic" in kind
        self.check_positions = PositionCheck()
        self._key: tuple[Any, ...] | None = None
        self._table: Rotation | None = None
        self._read: dict[KeyForm, Rotation] = {}

    def __call__(self, offset: int, length: int, end: int, device: torch.device, dtype: torch.dtype) -> Rotation:
        """cos and sin, each [at least length, rotary_dim], of positions from `offset` on, or from 0 on.

        From position `end` on nothing is stored yet (a static cache); the table may hold anything there.
        """
        key: tuple[Any, ...] = (device, dtype)
        rows = -(-int(length) // TABLE_ROWS) * TABLE_ROWS  # a step of decoding adds one key: not a new table each time
        if self.depends_on_length:
            # The empty rest of a static cache must not be seen.
            key, rows = (int(offset), int(length), int(end), device, dtype), int(length)
        if key != self._key or self._table is None or len(self._table[0]) < length:
            positions = torch.arange(rows, device=device)
            if self.depends_on_length:
                positions = (positions + offset).clamp(max=int(end) - 1)
            like = torch.empty(0, device=device, dtype=dtype)
            cos, sin = self._rotary(like, positions[None], *self._arguments)
            self._key, self._table, self._read = key, (cos[0].to(device), sin[0].to(device)), {}
        return self._table

    def when_read(self, form: KeyForm) -> Rotation:
        """`kernels.rotary.when_read` of the table that was last asked for; made once."""
        assert self._table is not None
        if torch.compiler.is_compiling():
            return when_read(self._table, form)
        if form not in self._read:
            self._read[form] = when_read(self._table, form)
        return self._read[form]


def rows_of(rotation: Rotation, rows: slice | Tensor) -> Rotation:
    """cos and sin of some positions."""
    return rotation[0][rows], rotation[1][rows]
