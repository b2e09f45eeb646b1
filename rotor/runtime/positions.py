"""Whether the positions that a model is given are what indices in the cache say, up to what attention cannot see.

Keys that are stored before RoPE are rotated by their index in the cache. Only differences of positions matter, and only
between a query and the keys that it sees: padding on the left shifts a whole row, documents packed with a mask of their
own each have their own shift. Where a query sees a key of another shift (a hole in the middle of a sequence with
positions that skip it, documents packed without such a mask), the result would be wrong without a word.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..errors import UsageError

QUERIES = 512
"""Queries that are compared with all keys at a time."""


class PositionCheck:
    """Compares positions with cache indices, once a forward pass, for all layers that share it.

    shifts: of each cache that is alive, the shift (position - index) of what was put into it, [batch_size, n].
    """

    def __init__(self) -> None:
        self._pass: tuple[Any, ...] = ()
        self._masks: list[Any] = []
        self._shifts: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model begins anew: it has caches of its own."""
        return type(self), ()

    def __call__(
        self, positions: Tensor | None, mask: Tensor | None, cache: Any, query_offset: Any, kv_offset: Any
    ) -> None:
        """Compare.

        Steps of one token on a GPU are left out, since looking at a result would make the host wait for it.

        Args:
            positions: [batch_size or 1, seq_len], or None if the model was given none.
            mask: [batch_size or 1, 1 or num_heads, seq_len, kv_len], boolean (True is seen) or additive; None: causal.
            cache: the cache that keys go into, or None. query_offset: index there of the first query.
            kv_offset: index of the first key that the mask has.
        Raises:
            UsageError: a query sees a key whose distance differs from the one that their positions say.
        """
        if positions is None or torch.compiler.is_compiling() or (positions.is_cuda and positions.shape[-1] == 1):
            return
        start, seq_len = int(query_offset), positions.shape[-1]
        if self._was_compared(positions, mask, cache, start):
            return
        index = torch.arange(start, start + seq_len, device=positions.device)
        shifts = self._with_known(positions - index, cache, start)
        if bool((shifts == shifts[:, :1]).all()):
            return
        first = int(kv_offset)
        for begin in range(0, seq_len, QUERIES):
            rows = range(start + begin, start + min(begin + QUERIES, seq_len))
            self._compare(shifts, rows, first, _seen(mask, begin, len(rows)))

    def _was_compared(self, positions: Tensor, mask: Tensor | None, cache: Any, start: int) -> bool:
        """Whether another layer of this forward pass has seen to it; layers may differ in their masks."""
        before = tuple(None if known is None else known() for known in self._pass[:2])
        if not before or before[0] is not positions or before[1] is not cache or self._pass[2] != start:
            self._pass, self._masks = (ref(positions), _reference(cache), start), []
        if any(
            (None if known is None else known()) is mask and (known is None) == (mask is None) for known in self._masks
        ):
            return True
        self._masks.append(_reference(mask))
        return False

    def _with_known(self, new: Tensor, cache: Any, start: int) -> Tensor:
        """The shifts of all indices so far, [batch_size, start + seq_len]; steps left out had the one before."""
        if cache is None:
            return new
        known = self._shifts.get(cache)
        if known is not None and len(new) == 1:
            new = new.expand(len(known), -1)
        if known is None or start == 0 or (len(known) != len(new) and len(new) % len(known)):
            known = new[:, :1]
        if len(known) != len(new):  # rows repeated for beams, or one row of positions for all
            known = known.repeat_interleave(len(new) // len(known), 0)
        known = known[:, :start]
        missing = start - known.shape[1]
        if missing:
            last = known[:, -1:] if known.shape[1] else new[:, :1]
            known = torch.cat([known, last.expand(-1, missing)], dim=1)
        shifts = torch.cat([known, new], dim=1)
        self._shifts[cache] = shifts
        return shifts

    def _compare(self, shifts: Tensor, rows: range, first: int, seen: Tensor | None) -> None:
        """Raises UsageError if one of the queries at the indices `rows` sees a key of another shift.

        Args:
            first: index of the first column of `seen`. seen: [batch_size, len(rows), keys]; None is causal.
        """
        keys = shifts[:, first:]
        differs = shifts[:, rows.start : rows.stop, None] != keys[:, None]
        count = keys.shape[1]
        if seen is None:
            query = torch.arange(rows.start, rows.stop, device=shifts.device)
            seen = torch.arange(first, first + count, device=shifts.device) <= query[:, None]
        else:
            own = torch.arange(len(rows), device=seen.device)
            seen = seen[..., :count] & seen[:, own, own + rows.start - first, None]  # padding does not see itself
        wrong = differs & seen
        if bool(wrong.any()):
            row, query, key = wrong.nonzero()[0].tolist()
            raise UsageError(
                f"row {row}: the tokens at {first + key} and {rows.start + query} of the cache are "
                f"{rows.start + query - first - key} apart there, but not by position_ids, and this checkpoint stores "
                "keys before RoPE, which it rotates by their place in the cache.",
                "Leave no holes inside a row (pad on the left), give packed documents a mask that parts them, or use a "
                "checkpoint with keys compressed after RoPE (rotor calibrate --set groups.domain=post).",
            )


def _seen(mask: Tensor | None, begin: int, count: int) -> Tensor | None:
    """Which keys some head of each query sees, [batch_size or 1, count, keys], for queries from `begin` on."""
    if mask is None:
        return None
    part = mask[:, :, begin : begin + count]
    seen = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
    return seen.any(1)


def _reference(value: Any) -> Any:
    return None if value is None else ref(value)
