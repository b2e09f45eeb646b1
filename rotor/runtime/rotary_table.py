"""Cosines and sines of RoPE by index in the cache, made once for the layers that share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .positions import PositionCheck
from .rope_blocks import block_starts
from .rotary_frequencies import depends_on_length

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
        self.depends_on_length = depends_on_length(kind)
        self.check_positions = PositionCheck()
        self._key: tuple[Any, ...] | None = None
        self._table: tuple[Tensor, Tensor] | None = None
        self._rows: tuple[int, tuple[Tensor, Tensor]] | None = None
        self._starts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._start_rows: tuple[tuple[int, int, int], tuple[Tensor, Tensor]] | None = None

    def __call__(
        self, offset: int, length: int, end: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, each [length, rotary_dim], of positions offset ... offset + length - 1, or 0 ... length - 1.

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
            self._key, self._table, self._rows = key, (cos[0].to(device), sin[0].to(device)), None
            self._starts, self._start_rows = {}, None
        if torch.compiler.is_compiling():
            return self._table[0][:length], self._table[1][:length]
        if self._rows is None or self._rows[0] != length:
            # The same tensors for all layers of a step: what follows from them is made once.
            self._rows = length, (self._table[0][:length], self._table[1][:length])
        return self._rows[1]

    def block_starts(self, rope_block: int, first: int, length: int) -> tuple[Tensor, Tensor]:
        """What turns keys to the beginning of their block, each [length, rotary_dim].

        Args:
            first: row of the first key in the table that was last asked for.
        """
        assert self._table is not None
        known = rope_block, int(first)
        if torch.compiler.is_compiling():
            return block_starts(self._table, rope_block, first, length)
        if known not in self._starts:
            self._starts = {known: block_starts(self._table, rope_block, known[1], len(self._table[0]) - known[1])}
        if self._start_rows is None or self._start_rows[0] != (*known, length):
            cos, sin = self._starts[known]
            self._start_rows = (*known, length), (cos[:length], sin[:length])
        return self._start_rows[1]
