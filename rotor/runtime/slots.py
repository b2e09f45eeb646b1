"""Slots of exact tokens, and rows, that the kernels read in a pass; computed once for layers that share it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.layout import ExactTokens
from ..kernels.slots import ExactSlots
from .exact import LATEST, SeenTokens, ring_index
from .passes import OfPass
from .rope import TokenSpan


class Bounds(NamedTuple):
    """Fields of `ExactSlots` but keys and values."""

    places: Tensor
    first: Tensor
    until: Tensor


def bounds_of(exact: ExactTokens, seen: SeenTokens, span: TokenSpan) -> Bounds:
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
    return Bounds(
        torch.where(places >= 0, places - kv_offset, -1).int(),
        (codes[:, 0] - kv_offset).int(),
        until.int().expand(batch_size, -1).contiguous(),
    )


_bounds: OfPass[Bounds] = OfPass()


def exact_slots(exact: ExactTokens, seen: SeenTokens, mask: Tensor | None, span: TokenSpan, layer: int) -> ExactSlots:
    """Exact tokens of a layer that the kernels read in a pass.

    Args:
        exact: of the layer, within its window. mask: of the pass. layer: index; what is computed for one serves later
            ones.
    """
    known_to_host = mask is not None or not isinstance(seen.length, Tensor)
    if not known_to_host:
        return ExactSlots(seen.key, seen.value, *bounds_of(exact, seen, span))
    capturing = seen.key.is_cuda and torch.cuda.is_current_stream_capturing()
    begin = seen.begin if isinstance(seen.begin, int) else None  # a tensor is what the mask says
    length = None if isinstance(seen.length, Tensor) else seen.length
    sizes = span.seq_len, span.kv_len, length, len(seen.key)
    key = exact, begin, seen.until, *sizes, seen.key.device, capturing
    bounds = _bounds(mask, key, layer, lambda: bounds_of(exact, seen, span))
    return ExactSlots(seen.key, seen.value, *bounds)
