"""Exact tokens of a layer: keys and values beside its rows of codes, and which of both a query attends to.

A query attends to each key once. Codes serve the keys from the end of the sequence's first tokens to the first of its
newest ones; all others lie in slots as the model made them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .ranges import KeyRanges


@dataclass(frozen=True)
class ExactSlots:
    """Exact keys and values that the new tokens of a pass attend to, these tokens among them.

    key, value: [batch_size, num_kv_heads, slots, head_dim], model's dtype, keys after RoPE, KV heads in the order of
        the layout.
    index: [batch_size, slots], int32, the row of each slot's token; negative where a slot has none, whose numbers are
        not read.
    first: [batch_size], int32. Codes serve the keys from this row on.
    until: [batch_size, seq_len], int32. Codes serve the keys before this row, for each new token. It does not fall
        from a token to the next. (Of packed sequences [tokens].)
    alone: nothing lies before the new tokens, so that no row is read; slot i then has row i.
    """

    key: Tensor
    value: Tensor
    index: Tensor
    first: Tensor
    until: Tensor
    alone: bool = False

    def coded(self, row: Tensor) -> Tensor:
        """Whether codes serve rows, [batch_size or 1, 1 or slots], for each new token: [batch_size, seq_len, slots]."""
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


def ranges_of_codes(ranges: KeyRanges, exact: ExactSlots) -> KeyRanges:
    """The keys of `ranges` that are read as codes."""
    if ranges.query_start is None:
        first, end = torch.maximum(ranges.first, exact.first), torch.minimum(ranges.end, exact.until.flatten())
        return replace(ranges, first=first, end=end, begin=first, until=end)
    start, until = ranges.query_start, exact.until.flatten()
    token = torch.arange(len(ranges.first), device=until.device)
    stop = start[1:].contiguous()
    sequence = torch.searchsorted(stop, token, right=True).clamp(max=len(stop) - 1)
    last = (stop - 1).clamp(min=0)
    return replace(
        ranges,
        first=torch.maximum(ranges.first, exact.first[sequence]),
        end=torch.minimum(ranges.end, until),
        begin=torch.maximum(ranges.begin, exact.first),
        until=torch.minimum(ranges.until, until[last]),
    )
