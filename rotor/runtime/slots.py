"""Slots of exact tokens, and rows, that the kernels read in a pass; computed once for layers that share it."""

from __future__ import annotations

import torch

from ..checkpoint.layout import ExactTokens
from ..kernels.passes import Pass, TokenSpan
from ..kernels.slots import ExactSlots, SlotBounds
from .exact import LATEST, SeenTokens, ring_index


def bounds_of(exact: ExactTokens, seen: SeenTokens, span: TokenSpan) -> SlotBounds:
    """Compute where the tokens of each slot lie among the rows, and which rows are read; nothing waits for the device.

    Args:
        exact: of the layer, within its window.
    """
    device, batch_size = seen.key.device, len(seen.key)
    offset, kv_offset = span.query_offset, span.kv_offset
    begin = seen.begin
    if isinstance(begin, int):
        begin = torch.full((batch_size,), min(begin, LATEST), device=device)
    begin = begin.clamp(max=LATEST)[:, None]
    codes = begin + exact.first
    first = begin + torch.arange(exact.first, device=device)
    newest = ring_index(exact, seen.length, device).expand(batch_size, -1)
    index = [
        torch.where(first < seen.length, first, -1),
        torch.where((newest >= max(seen.until, 0)) & (newest >= codes), newest, -1),
    ]
    new = torch.arange(span.seq_len, device=device) + offset
    if span.seq_len > 1:
        index.append(new.expand(batch_size, -1))
    places = torch.cat(index, -1)
    until = (new - exact.newest + 1).clamp(min=seen.until)
    until = torch.minimum(until, new[:1]) - kv_offset
    return SlotBounds(
        places=torch.where(places >= 0, places - kv_offset, -1).int(),
        first=(codes[:, 0] - kv_offset).int(),
        until=until.int().expand(batch_size, -1).contiguous(),
    )


def exact_slots(exact: ExactTokens, seen: SeenTokens, now: Pass) -> ExactSlots:
    """Exact tokens of a layer that the kernels read in a pass.

    Args:
        exact: of the layer, within its window.
    """
    bounds = now.once(("bounds", *seen.known(exact)), lambda: bounds_of(exact, seen, now.span))
    return ExactSlots(seen.key, seen.value, *bounds)
