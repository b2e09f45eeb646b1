"""Exact tokens of a layer: keys and values beside its rows of codes, and which of both a query attends to.

A query attends to each key once. Codes serve the keys from the end of the sequence's first tokens to the first of its
newest ones; all others lie in slots as the model made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class SlotsToFill(NamedTuple):
    """Where one new token of each sequence is kept exactly: in the slot of its index, and if it is one of the first
    tokens in the slot of that.

    keys, values: [batch_size, num_kv_heads, slots, head_dim], of equal strides, KV heads in the order of the layout,
        keys after RoPE. Slot s < first is of token begin + s, slot first + i mod newest of token i. There are first +
        newest slots, or fewer for a sequence that is shorter.
    offset: index of the new token. begin: index of the first token of each sequence, [batch_size], or one for all.
    """

    keys: Tensor
    values: Tensor
    first: int
    newest: int
    offset: Tensor | int
    begin: Tensor | int


class SlotBounds(NamedTuple):
    """Parts that `ExactSlots` of several layers share, in the order of its fields: places are its index."""

    places: Tensor
    first: Tensor
    until: Tensor


@dataclass(frozen=True)
class ExactSlots:
    """Exact keys and values that the new tokens of a pass attend to, these tokens among them.

    key, value: [batch_size, num_kv_heads, slots, head_dim], model's dtype, keys after RoPE, KV heads in the order of
        the layout. With a block table pages, [num_pages, num_kv_heads, page_size, head_dim], which only decoding reads.
    index: [batch_size, slots], int32, the row of each slot's token; negative where a slot has none, whose numbers are
        not read.
    first: [batch_size], int32. Codes serve the keys from this row on.
    until: [batch_size, seq_len], int32. Codes serve the keys before this row, for each new token. It does not fall
        from a token to the next. (Of packed sequences [tokens].)
    block_table: [batch_size, pages of a sequence], int32; row i is in place i % page_size of page i // page_size. None:
        slots lie one behind the other.
    """

    key: Tensor
    value: Tensor
    index: Tensor
    first: Tensor
    until: Tensor
    block_table: Tensor | None = None

    def part(self, sequences: slice, until: Tensor) -> ExactSlots:
        """The slots of some sequences.

        Args:
            until: of the new tokens of these.
        """
        own = self.index[sequences], self.first[sequences], until
        if self.block_table is not None:
            return ExactSlots(self.key, self.value, *own, self.block_table[sequences])
        return ExactSlots(self.key[sequences], self.value[sequences], *own)

    def coded(self, row: Tensor) -> Tensor:
        """Tell which rows, [batch_size or 1, 1 or slots], codes serve for a new token: [batch_size, seq_len, slots]."""
        row = row[:, None]
        return (row >= self.first[:, None, None]) & (row < self.until[:, :, None])

    def mask(self, mask: Tensor | None, kv_len: int) -> Tensor:
        """Mask over all rows and, behind them, all slots, [batch_size, heads or 1, seq_len, kv_len + slots], bool.

        Args:
            mask: over rows, bool, [batch_size or 1, heads or 1, seq_len or 1, kv_len]; None allows all.
        """
        row = torch.arange(kv_len, device=self.index.device)
        coded = self.coded(row[None])[:, None]
        place = self.index.long().clamp(min=0)
        held = ((self.index >= 0)[:, None] & ~self.coded(self.index))[:, None]
        if mask is None:
            return torch.cat([coded, held], dim=-1)
        batch_size, _, seq_len, _ = coded.shape
        mask = mask.expand(batch_size, -1, seq_len, kv_len)
        at_slots = mask.gather(-1, place[:, None, None].expand(-1, mask.shape[1], seq_len, -1))
        return torch.cat([coded & mask, held & at_slots], dim=-1)
