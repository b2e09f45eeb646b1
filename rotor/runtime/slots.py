"""Slots of exact tokens, and rows, that the kernels read in a pass; computed once for layers that share it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint import ExactTokens
from ..kernels.slots import ExactSlots
from .exact import LATEST, SeenTokens, ring_index
from .rope import TokenSpan


class Bounds(NamedTuple):
    """What `ExactSlots` says of a pass, without keys and values."""

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


@dataclass
class _Known:
    """The bounds of a pass, of layers with windows alike: valid for later layers than `layer`."""

    mask: weakref.ref[Tensor] | None
    key: tuple[object, ...]
    layer: int
    bounds: Bounds


class _Pass:
    """The latest bounds. The layers go through a pass in their order, and share its mask."""

    def __init__(self) -> None:
        self.known: list[_Known] = []

    def __call__(
        self, exact: ExactTokens, seen: SeenTokens, mask: Tensor | None, span: TokenSpan, layer: int
    ) -> Bounds:
        if torch.compiler.is_compiling() or (mask is None and isinstance(seen.length, Tensor)):
            return bounds_of(exact, seen, span)
        capturing = seen.key.is_cuda and torch.cuda.is_current_stream_capturing()
        length = None if isinstance(seen.length, Tensor) else seen.length
        version = None if mask is None or mask.is_inference() else mask._version
        sizes = span.seq_len, span.kv_len, length, len(seen.key)
        key = exact, seen.until, *sizes, seen.key.device, version, capturing
        for known in self.known:
            same = known.mask is None if mask is None else known.mask is not None and known.mask() is mask
            if same and known.key == key and known.layer < layer:
                known.layer = layer
                return known.bounds
        bounds = bounds_of(exact, seen, span)
        of_mask = None if mask is None else weakref.ref(mask)
        self.known = [*self.known[-3:], _Known(of_mask, key, layer, bounds)]
        return bounds


_bounds = _Pass()


def exact_slots(exact: ExactTokens, seen: SeenTokens, mask: Tensor | None, span: TokenSpan, layer: int) -> ExactSlots:
    """What the kernels read of a layer's exact tokens in a pass.

    Args:
        exact: of the layer, within its window. mask: of the pass. layer: index; what is computed for one serves later
            ones.
    """
    return ExactSlots(seen.key, seen.value, *_bounds(exact, seen, mask, span, layer))
