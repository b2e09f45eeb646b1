"""Whether the positions that a model is given are what indices in the cache say, up to what attention cannot see.

Keys that are stored before RoPE are rotated by their index in the cache. Only differences of positions matter, and only
between a query and the keys that it sees: padding on the left shifts a whole sequence, documents packed with a mask of
their own each have their own shift. Where a query sees a key of another shift (a hole in the middle of a sequence with
positions that skip it, documents packed without such a mask), the result would be wrong without a word.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..errors import UsageError

SHIFTS = "rotor_shifts"
"""Attribute of a cache that a model with keys before RoPE has filled, which its copies have too: position less index of
its tokens, [batch_size, n]; tokens behind these have the last one's."""

QUERIES = 512
"""Queries that are compared with all keys at a time."""


class PositionCheck:
    """Compares positions with cache indices, once a forward pass, for all layers that share it."""

    def __init__(self) -> None:
        self._layer = -1
        self._masks: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(
        self,
        positions: Tensor | None,
        mask: Tensor | None,
        cache: Any,
        layer_idx: int,
        batch_size: int,
        query_offset: Any,
        kv_offset: Any,
    ) -> None:
        """Compare.

        Steps of one token on a GPU are left out, since looking at a result would make the host wait for it.

        Args:
            positions: [batch_size or 1, seq_len], or None if the model was given none.
            mask: [batch_size or 1, 1 or num_heads, seq_len, kv_len], boolean (True: attend) or additive; None: causal.
            cache: the cache that keys go into, or None. query_offset: index there of the first query.
            kv_offset: index of the first key that the mask has.
        Raises:
            UsageError: a query sees a key whose distance differs from the one that their positions say; or the cache
                holds tokens whose positions nobody knows.
        """
        if positions is None or torch.compiler.is_compiling() or self._was_compared(mask, layer_idx):
            return
        seq_len, compares = positions.shape[-1], not positions.is_cuda or positions.shape[-1] > 1
        if not compares and (hasattr(cache, SHIFTS) or torch.cuda.is_current_stream_capturing()):
            return
        start = int(query_offset)
        index = torch.arange(start, start + seq_len, device=positions.device)
        new = (positions - index).expand(batch_size, -1)
        shifts = torch.cat([_known(cache, start, batch_size).to(new.device), new], dim=1) if start else new
        alike = not compares or bool((shifts == shifts[:, :1]).all())
        if cache is not None:
            setattr(cache, SHIFTS, shifts[:, :1].clone() if alike else shifts)
        if alike:
            return
        first = int(kv_offset)
        for begin in range(0, seq_len, QUERIES):
            queries = range(start + begin, start + min(begin + QUERIES, seq_len))
            _compare(shifts, queries, first, _visible(mask, begin, len(queries)))

    def _was_compared(self, mask: Tensor | None, layer_idx: int) -> bool:
        """Whether another layer of this pass compared this mask; layers come in their order, a pass begins anew."""
        if layer_idx <= self._layer:
            self._masks = []
        self._layer = layer_idx
        if any(known is None if mask is None else known is not None and known() is mask for known in self._masks):
            return True
        self._masks.append(None if mask is None else ref(mask))
        return False


def _known(cache: Any, start: int, batch_size: int) -> Tensor:
    """The shifts of all that a cache holds, [batch_size, start]."""
    known: Tensor | None = getattr(cache, SHIFTS, None)
    if known is not None and bool((known == known[:1]).all()):
        known = known[:1].expand(batch_size, -1)  # no matter which sequences were taken
    elif known is not None and batch_size % len(known) == 0:
        known = known.repeat_interleave(batch_size // len(known), 0)
    if known is None or len(known) != batch_size or not known.shape[1]:
        raise UsageError(
            f"the cache holds {start} tokens whose positions are unknown, and this checkpoint stores keys before RoPE, "
            "which it rotates by their place in the cache.",
            "Fill an empty cache by this model, copy it as a whole (copy.deepcopy, torch.save), and take no sequences "
            "out of a batch with padding.",
        )
    known = known[:, :start]
    return torch.cat([known, known[:, -1:].expand(-1, start - known.shape[1])], dim=1)


def _compare(shifts: Tensor, queries: range, first: int, visible: Tensor | None) -> None:
    """Raises UsageError if one of the queries at these indices sees a key of another shift.

    Args:
        first: index of the first key of `visible`. visible: [batch_size, len(queries), keys]; None is causal.
    """
    keys = shifts[:, first:]
    differs = shifts[:, queries.start : queries.stop, None] != keys[:, None]
    count = keys.shape[1]
    if visible is None:
        query = torch.arange(queries.start, queries.stop, device=shifts.device)
        visible = torch.arange(first, first + count, device=shifts.device) <= query[:, None]
    else:
        # Padding does not see itself.
        own = torch.arange(len(queries), device=visible.device)
        visible = visible[..., :count] & visible[:, own, own + queries.start - first, None]
    wrong = differs & visible
    if bool(wrong.any()):
        sequence, query, key = wrong.nonzero()[0].tolist()
        raise UsageError(
            f"sequence {sequence}: the tokens at {first + key} and {queries.start + query} of the cache are "
            f"{queries.start + query - first - key} apart there, but not by position_ids, and this checkpoint stores "
            "keys before RoPE, which it rotates by their place in the cache.",
            "Leave no holes inside a sequence (pad on the left), give packed documents a mask that parts them, or use "
            "a checkpoint with keys compressed after RoPE (rotor calibrate --set groups.domain=post).",
        )


def _visible(mask: Tensor | None, begin: int, count: int) -> Tensor | None:
    """Which keys some head of each query sees, [batch_size or 1, count, keys], for queries from `begin` on."""
    if mask is None:
        return None
    part = mask[:, :, begin : begin + count]
    visible = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
    return visible.any(1)
