"""Keys and values that a cache keeps exactly beside its rows: the first and the newest tokens of each sequence.

Rows of all tokens stay in transformers' own layers. A layer that also keeps exact tokens takes the place of the stock
layer when attention first meets the cache (`with_exact_rows`), so that whatever is done to a cache is done to both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..checkpoint.layout import MOST_ROPE_BLOCK, ExactTokens
from ..errors import UsageError
from ..kernels.exact_slots import ExactSlots, SlotBounds, SlotsToFill
from ..kernels.parameters import shown_by
from ..kernels.passes import Pass, TokenSpan

if TYPE_CHECKING:
    from transformers import Cache

FAR = 1 << 40
"""Index of the first token of a sequence that has been nothing but padding so far."""

LATEST = 1 << 30
"""Largest index of a token that kernels take: what is beyond has not begun."""

REMEMBERED_QUERIES = 64
"""New tokens up to which masks are kept for the layers that follow; those of longer passes are large."""


class NewTokens(NamedTuple):
    """The new tokens of a pass as the model makes them, KV heads in the order of the layout.

    query: [batch_size, num_heads, seq_len, head_dim]. key, value: [batch_size, num_kv_heads, seq_len, head_dim].
    Queries and keys are rotated as queries meet rows: in blocks by their index in the cache, whatever positions the
    model was given, so that plain PyTorch and the kernels read one cache alike.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class SeenTokens(NamedTuple):
    """Exact keys and values that the queries of a pass see in a cache.

    key, value: [batch_size, num_kv_heads, slots, head_dim], see ExactRows; behind the slots, where several tokens are
    new, those. A single new token is in its slot.
    begin: index of the first token of each sequence behind padding, [batch_size], or one for all.
    until: index from which on the ring has all tokens. length: number of tokens that the slots are of.
    slots: their number.
    """

    key: Tensor
    value: Tensor
    begin: Tensor | int
    until: int
    length: int | Tensor
    slots: int

    def known(self, exact: ExactTokens) -> tuple[object, ...]:
        """Key that tells apart the exact tokens of the layers of a pass; tensors are alike in all of them."""
        numbers = (None if isinstance(number, Tensor) else number for number in self[2:])
        return exact, *numbers, len(self.key), self.key.device


class Division(NamedTuple):
    """The keys of a pass, divided into those read from rows and those read exactly.

    rows: mask over rows; None: all in `keys`. keys: rows that some query reads lie within it, from the beginning of a
    block on; None: not known, empty: none. exact: mask over SeenTokens.key; None: all.
    """

    rows: Tensor | None
    keys: range | None
    exact: Tensor | None


class ExactState(NamedTuple):
    """Content of `ExactRows`, as a file keeps it; see there. begin: [batch_size], int64."""

    keys: Tensor
    values: Tensor
    begin: Tensor
    until: int


class ExactRows:
    """The exact tokens of one layer of a cache.

    Slot s < first holds token begin + s of each sequence; token i is also in slot first + i mod newest, as long as
    no newer one is. What is taken back by a crop leaves its slots empty: tokens before `until` are not in the ring, and
    are read from their rows. In a cache that grows, so do the slots, as no token of a sequence that is shorter than the
    ring is in a later slot than first + its index.

    keys, values: [batch_size, num_kv_heads, slots, head_dim], of a static cache first + newest slots, of others
        `ExactTokens.slots_of` the longest length so far; None as long as there is no token.
    begin: see SeenTokens; None as long as there is no token. latest: the largest of `begin`, FAR if it is not known.
    """

    def __init__(self, exact: ExactTokens) -> None:
        self.exact = exact
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew; tensors are kept where they are."""
        self.begin: Tensor | int | None = None
        self.latest, self.until = FAR, 0

    def step(self, start: Tensor | int, offset: Tensor | int, fixed: bool) -> tuple[SlotsToFill, SeenTokens] | None:
        """Where a single new token of each sequence is to be stored, and what its queries see once it is there; None if
        `add` must store it.

        Args:
            start, offset, fixed: as of `add`, which is then given that it is filled.
        """
        if self.keys is None or self.values is None:
            return None
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            return None
        self._begin(start, len(self.keys))
        assert self.begin is not None
        begin = min(self.begin, LATEST) if isinstance(self.begin, int) else self.begin
        if not fixed and isinstance(offset, int):
            self._make_room(offset + 1)
        seen = self._seen(offset, 1, fixed)
        return SlotsToFill(self.keys, self.values, self.exact.first, self.exact.newest, offset, begin), seen

    def add(
        self, new: NewTokens, start: Tensor | int, span: TokenSpan, fixed: bool, filled: bool = False
    ) -> SeenTokens | None:
        """Store the new tokens of a pass.

        Args:
            start: `first_real` of the pass. span: where its tokens lie; query_offset is a number wherever the host
                knows it.
            fixed: the tensors must stay where they are in memory (a static cache).
            filled: the new tokens are in their slots already.
        Returns:
            What the queries see exactly; None where nothing lies before them.
        """
        offset, seq_len = span.query_offset, span.seq_len
        self._begin(start, len(new.key))
        assert self.begin is not None
        grows = not fixed and isinstance(offset, int)
        if self.keys is None or self.values is None:
            slots = self.exact.slots_of(offset + seq_len) if grows else self.exact.slots
            shape = (*new.key.shape[:2], slots, new.key.shape[3])
            self.keys, self.values = new.key.new_zeros(shape), new.value.new_zeros(shape)
        before = None
        if seq_len > 1 and not (isinstance(offset, int) and offset == 0):
            key, value = torch.cat([self.keys, new.key], 2), torch.cat([self.values, new.value], 2)
            before = SeenTokens(key, value, self.begin, self.until, offset, self.keys.shape[2])
        if grows:
            self._make_room(offset + seq_len)
        if not filled:
            self.keys = self._stored(self.keys, new.key, offset)
            self.values = self._stored(self.values, new.value, offset)
        seen = self._seen(offset, seq_len, fixed)
        return before if seq_len > 1 else seen

    def _seen(self, offset: Tensor | int, seq_len: int, fixed: bool) -> SeenTokens:
        """The slots as queries see them once the new tokens are there."""
        assert self.keys is not None
        assert self.values is not None
        assert self.begin is not None
        if not fixed:  # a static cache takes nothing back, so that its ring is whole
            until: Any = min(self.until, offset)  # tokens from there on were taken back, and come anew
            self.until = max(until, offset + seq_len - self.exact.newest)
        return SeenTokens(self.keys, self.values, self.begin, self.until, offset + seq_len, self.keys.shape[2])

    def _make_room(self, tokens: int) -> None:
        """Add the slots that a sequence of so many tokens lacks."""
        assert self.keys is not None
        assert self.values is not None
        missing = self.exact.slots_of(tokens) - self.keys.shape[2]
        if missing > 0:
            self.keys, self.values = (functional.pad(side, (0, 0, 0, missing)) for side in (self.keys, self.values))

    def _begin(self, start: Tensor | int, batch_size: int) -> None:
        """Find where sequences begin of which nothing but padding was known."""
        if isinstance(self.begin, int):
            return
        if isinstance(start, Tensor):
            start = start.expand(batch_size)
        if self.begin is None:
            self.begin = start.clone() if isinstance(start, Tensor) else start
        else:
            self.begin = torch.minimum(self.begin, start) if isinstance(start, Tensor) else self.begin.clamp(max=start)
        if isinstance(self.begin, Tensor) and _on_host(self.begin):
            first, self.latest = int(self.begin.min()), int(self.begin.max())
            self.begin = first if first == self.latest < FAR else self.begin
        if isinstance(self.begin, int):
            self.latest = self.begin

    def _stored(self, slots: Tensor, new: Tensor, offset: int | Tensor) -> Tensor:
        """Put new keys or values into their slots, in place unless gradients or inference mode forbid it."""
        held = slots.requires_grad or (slots.is_inference() and not torch.is_inference_mode_enabled())
        if held or new.requires_grad:
            slots = slots.clone()
        first, newest, seq_len = self.exact.first, self.exact.newest, new.shape[2]
        count = min(seq_len, newest)
        if isinstance(offset, int) and isinstance(self.begin, int):
            start, stop = max(self.begin, offset), min(self.begin + first, offset + seq_len)
            if start < stop:
                slots[:, :, start - self.begin : stop - self.begin] = new[:, :, start - offset : stop - offset]
        elif first and not (isinstance(offset, int) and offset >= self.latest + first):
            begin = self.begin[:, None] if isinstance(self.begin, Tensor) else self.begin
            assert begin is not None
            index = begin + torch.arange(first, device=new.device) - offset
            index = index.reshape(-1, 1, first, 1)
            there = (index >= 0) & (index < seq_len)
            taken = new.gather(2, index.clamp(0, seq_len - 1).expand(len(new), new.shape[1], -1, new.shape[3]))
            slots[:, :, :first] = torch.where(there, taken, slots[:, :, :first])
        index = torch.arange(count, device=new.device) + (offset + seq_len - count)
        slots.index_copy_(2, index % newest + first, new[:, :, seq_len - count :])
        return slots

    def state(self, tokens: int) -> ExactState | None:
        """Contents for sequences of so many tokens, in the slots that those take; None as long as there is none."""
        if self.keys is None or self.values is None or self.begin is None:
            return None
        slots = self.exact.slots_of(tokens)
        begin = torch.zeros(len(self.keys), dtype=torch.int64, device=self.keys.device) + self.begin
        return ExactState(self.keys[:, :, :slots], self.values[:, :, :slots], begin, self.until)

    def restore(self, state: ExactState) -> None:
        """Hold what `state` gave."""
        self.keys, self.values, begin, self.until = state
        first, self.latest = int(begin.min()), int(begin.max())
        self.begin = first if first == self.latest < FAR else begin.to(self.keys.device)

    def stored_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in vars(self).values() if isinstance(tensor, Tensor))

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of tensors [batch_size, ...] to all that belongs to sequences."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)
        if isinstance(self.begin, Tensor):
            self.begin = change(self.begin)


def first_real(mask: Tensor | None, span: TokenSpan) -> Tensor | int:
    """Index of each sequence's first new token that is no padding, FAR where there is none, [batch_size]; one for all
    without a mask. A token that is no padding sees itself.

    Args:
        mask: of a pass, over all keys, [batch_size or 1, num_heads or 1, seq_len or 1, kv_len].
    """
    offset: Tensor | int = span.query_offset
    if mask is None:
        return offset
    place = torch.arange(span.seq_len, device=mask.device)
    itself = mask.expand(-1, -1, span.seq_len, -1)[:, :, place, place + (offset - span.kv_offset)]
    real = shown_by(itself).any(1)
    return torch.where(real.any(-1), real.int().argmax(-1) + offset, FAR)


def _on_host(tensor: Tensor) -> bool:
    """Tell whether reading a number makes nobody wait."""
    return tensor.device.type == "cpu"


def ring_index(exact: ExactTokens, seen: SeenTokens) -> Tensor:
    """Index of the token in each slot of the ring, [slots - first]; below 0 where there is none."""
    last, slot = seen.length - 1, torch.arange(seen.slots - exact.first, device=seen.key.device)
    return last - (last - slot) % exact.newest  # type: ignore[no-any-return]


def divided(exact: ExactTokens, seen: SeenTokens, mask: Tensor | None, span: TokenSpan) -> Division:
    """Divide the keys of a pass behind others.

    Args:
        exact: of the layer, within its window. mask: of the pass, over all rows; None: one token that sees all rows, or
            several by their index.
    """
    device, seq_len = seen.key.device, span.seq_len
    offset, kv_offset = span.query_offset, span.kv_offset
    query = torch.arange(seq_len, device=device)[:, None] + offset  # [seq_len, 1]
    index = torch.arange(span.kv_len, device=device) + kv_offset
    if mask is None and seq_len > 1:
        mask = (index <= query)[None, None]
    begin = seen.begin[:, None, None] if isinstance(seen.begin, Tensor) else seen.begin
    new = index >= offset
    by_row = ~(new | exact.is_exact(query, index, begin, seen.until))
    by_row = by_row if by_row.dim() == 3 else by_row[None]

    newest = ring_index(exact, seen)
    first = begin + torch.arange(exact.first, device=device)  # [first] or [batch_size, 1, first]
    of_first = (first < seen.length) & (first >= kv_offset) & ~exact.is_newest(query, first, seen.until)
    of_newest = (newest >= kv_offset) & exact.is_newest(query, newest, max(seen.until, 0))
    of_newest = of_newest.expand(*of_first.shape[:-1], -1)
    by_slot = torch.cat([of_first, of_newest], -1)
    by_slot = by_slot if by_slot.dim() == 3 else by_slot[None]
    if mask is None:
        return Division(by_row[:, None], _rows_seen(by_row), by_slot[:, None])
    places = torch.cat([first, newest.expand(*first.shape[:-1], -1)], -1) - kv_offset
    shown = _columns(mask, places.clamp(0, span.kv_len - 1), len(seen.key))
    shown = _restricted(shown, by_slot)
    if seq_len > 1:
        new_columns = torch.arange(seq_len, device=device) + (offset - kv_offset)
        shown = torch.cat([shown, mask[..., new_columns].expand(*shown.shape[:2], seq_len, -1)], -1)
    rows = _restricted(mask, by_row)
    return Division(rows, _rows_seen(shown_by(rows)), shown)


def _columns(mask: Tensor, places: Tensor, batch_size: int) -> Tensor:
    """Columns of a mask [batch_size or 1, heads or 1, seq_len or 1, kv_len] at places [n] or [batch_size, 1, n]."""
    if places.dim() == 1:
        return mask[..., places]
    index = places.unsqueeze(1).expand(-1, mask.shape[1], mask.shape[2], -1)
    return mask.expand(batch_size, -1, -1, -1).gather(-1, index)


def _restricted(mask: Tensor, by: Tensor) -> Tensor:
    """A mask without the keys that are not in `by`, [batch_size or 1, seq_len, n]."""
    return mask & by[:, None] if mask.dtype == torch.bool else mask.masked_fill(~by[:, None], -torch.inf)


def _rows_seen(shown: Tensor) -> range | None:
    """The rows that some query sees, from the beginning of a block on; None on a device, whose answer would be waited
    for."""
    if not _on_host(shown):
        return None
    places = shown.flatten(0, -2).any(0).nonzero()
    if not len(places):
        return range(0)
    first = int(places[0])
    return range(first - first % MOST_ROPE_BLOCK, int(places[-1]) + 1)


def division_of_pass(exact: ExactTokens, seen: SeenTokens, mask: Tensor | None, now: Pass) -> Division:
    """`divided`, computed once for the layers of a pass that are alike; the masks of many queries are not kept."""
    if now.span.seq_len > REMEMBERED_QUERIES:
        return divided(exact, seen, mask, now.span)
    return now.once(("division", *seen.known(exact)), lambda: divided(exact, seen, mask, now.span))


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
    newest = ring_index(exact, seen).expand(batch_size, -1)
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


class WithExactRows:
    """A cache's layer of rows that also keeps exact tokens.

    exact_rows: these. rows: `update` is given NewTokens, the first that are no padding and the span of a pass by name,
    and whether the slots of `ExactRows.step` were filled, and puts what its queries see into `seen`.
    """

    exact_rows: ExactRows
    seen: SeenTokens | None = None
    fixed = False

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        exact: NewTokens | None = None,
        start: Tensor | int = 0,
        span: TokenSpan | None = None,
        filled: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        if exact is None or span is None:
            raise UsageError(
                "a cache whose layers keep exact tokens was given rows alone.",
                "Use a cache with the model that filled it.",
            )
        self.seen = self.exact_rows.add(exact, start, span, self.fixed, filled)
        rows: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        return rows

    def take_seen(self) -> SeenTokens | None:
        """Give what the queries of the pass see exactly; once, since it holds the tensors of the pass."""
        seen, self.seen = self.seen, None
        return seen

    def offload(self) -> None:
        super().offload()  # type: ignore[misc]
        self.exact_rows.map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()  # type: ignore[misc]
        device: torch.device | None = getattr(self, "device", None)
        if device is not None:
            self.exact_rows.map(lambda tensor: tensor.to(device, non_blocking=True))

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.exact_rows.forget()
        if not self.fixed:
            self.exact_rows.keys = self.exact_rows.values = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.exact_rows.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))


class GrowingWithExactRows(WithExactRows):
    """The same of a cache that grows, from which tokens can be taken back."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.exact_rows.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.exact_rows.map(lambda tensor: tensor[indices, ...])

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if not self.get_seq_length():  # type: ignore[attr-defined]
            self.exact_rows.forget()


class ExactDynamicLayer(GrowingWithExactRows, DynamicLayer):
    """transformers' DynamicLayer with exact tokens."""


class ExactSlidingWindowLayer(GrowingWithExactRows, DynamicSlidingWindowLayer):
    """transformers' DynamicSlidingWindowLayer with exact tokens."""


class ExactStaticLayer(WithExactRows, StaticLayer):
    """transformers' StaticLayer with exact tokens."""

    fixed = True


class ExactStaticSlidingWindowLayer(WithExactRows, StaticSlidingWindowLayer):
    """transformers' StaticSlidingWindowLayer with exact tokens."""

    fixed = True


# Older versions of transformers have no layers of keys and values beside a state.
BESIDE_STATE: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", DynamicLayer)
STATIC_BESIDE_STATE: Any = getattr(cache_utils, "LinearAttentionAndStaticFullAttentionLayer", StaticLayer)


class ExactLayerBesideState(GrowingWithExactRows, BESIDE_STATE):  # type: ignore[misc]
    """transformers' LinearAttentionAndFullAttentionLayer with exact tokens."""


class ExactStaticLayerBesideState(WithExactRows, STATIC_BESIDE_STATE):  # type: ignore[misc]
    """transformers' LinearAttentionAndStaticFullAttentionLayer with exact tokens."""

    fixed = True


REPLACED: dict[type, type[WithExactRows]] = {
    BESIDE_STATE: ExactLayerBesideState,
    STATIC_BESIDE_STATE: ExactStaticLayerBesideState,
    DynamicLayer: ExactDynamicLayer,
    DynamicSlidingWindowLayer: ExactSlidingWindowLayer,
    StaticLayer: ExactStaticLayer,
    StaticSlidingWindowLayer: ExactStaticSlidingWindowLayer,
}
"""The stock layers that can keep exact tokens, and what takes their place."""


def with_exact_rows(cache: Cache, layer_idx: int, exact: ExactTokens) -> WithExactRows:
    """The layer of a cache, which keeps exact tokens from now on; a stock one is replaced.

    Raises:
        UsageError: a layer of another kind, or one that was filled without exact tokens.
    """
    layers: list[Any] = cache.layers
    if cache.layer_class_to_replicate is not None:  # transformers makes them at the first update
        while len(layers) <= layer_idx:
            layers.append(cache.layer_class_to_replicate())
    layer = layers[layer_idx]
    if isinstance(layer, WithExactRows):
        return layer
    kind = REPLACED.get(type(layer))
    if kind is None:
        raise UsageError(
            f"layer {layer_idx}: the cache is a {type(layer).__name__}, in which a checkpoint that keeps its first and "
            "newest tokens exactly has no place for them.",
            "Leave cache_implementation out, or use 'static' or 'offloaded'.",
        )
    if isinstance(layer, DynamicLayer) and layer.get_seq_length():
        raise UsageError(
            f"layer {layer_idx}: the cache holds {layer.get_seq_length()} tokens that another model put there.",
            "Begin with an empty cache.",
        )
    made = kind.__new__(kind)
    vars(made).update(vars(layer))
    made.exact_rows = ExactRows(exact)
    layers[layer_idx] = made
    return made
