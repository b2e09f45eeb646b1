"""Policies that code keys and values: what the methods share, and the cache layer around two sides of coded tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .layer import PolicyLayer, left_padding
from .policy import Policy
from .store import Side, Stream

BITS = (16, 8, 4, 3, 2)


class Quantiser(Policy):
    """A policy that codes every token."""

    @abstractmethod
    def streams(self) -> tuple[Stream, Stream]:
        """How keys and values are coded."""

    @property
    def longest_step(self) -> int | None:
        steps = [step for step in (stream.longest_step for stream in self.streams()) if step is not None]
        return min(steps, default=None)

    def layers(self, count: int) -> list[PolicyLayer]:
        return [CodedLayer(self.streams()) for _ in range(count)]

    def check_coded(self) -> None:
        raise UsageError(
            f"cache policy {self.method}: this checkpoint's rows are codes already, which it would take for numbers.",
            "Use --cache none or a policy that evicts, or a recipe whose columns have 16 bits (rotor-16).",
        )


class CodedLayer(PolicyLayer):
    """One layer's cache, coded as two streams say.

    It works on a model's heads, and on a compressed model's packed rows [batch_size, 1, seq_len, width] of 16 bits.

    Args:
        streams: of keys and of values.
        padding: [batch_size], tokens of padding on the left of each row. With it each row is stored by itself, without
            its padding, so that what is stored of a row does not depend on the others. Beams of a row are expanded.
            An attention module that knows its cache gives the mask instead, with `begin`.

    Limits: attention decodes the whole cache at each step; not for static or assisted caches.
    """

    def __init__(self, streams: tuple[Stream, Stream], padding: Tensor | None = None) -> None:
        super().__init__()
        self.streams = streams
        self.padding = padding
        self._pads: list[int] | None = None
        self._stores: list[tuple[Side, Side]] = []

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        if mask is None:
            return
        if not self.is_initialized and self.padding is None:
            padding = left_padding(mask, batch_size)
            self.padding = padding if bool(padding.any()) else None
        elif self._pads is not None and max(self._pads) >= self.seen:  # a row that is padding so far
            now = left_padding(mask, batch_size).tolist()
            self._pads = [new if old >= self.seen else old for old, new in zip(self._pads, now, strict=True)]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not key_states.is_floating_point() or key_states.element_size() == 1:
            raise UsageError(
                f"a cache policy was given rows of {key_states.dtype}, which are codes already.",
                "Use --cache none with this checkpoint, or a policy with a checkpoint of 16-bit columns.",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        batch_size, rows = key_states.shape[0], 1
        if self.padding is not None:
            if batch_size % len(self.padding):
                raise UsageError(
                    f"the cache was made for a batch of {len(self.padding)} rows and is given {batch_size}.",
                    "Make a new cache for each batch, from its own attention mask.",
                )
            self._pads = self.padding.repeat_interleave(batch_size // len(self.padding)).tolist()
            rows = batch_size
        likes = [[states[:1] if self._pads else states for states in (key_states, value_states)] for _ in range(rows)]
        self._stores = [(Side(self.streams[0], key), Side(self.streams[1], value)) for key, value in likes]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns the keys and values of all tokens, as this step's attention is to see them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key, value = self._update_side(0, key_states), self._update_side(1, value_states)
        self.seen += key_states.shape[-2]
        return key, value

    def _update_side(self, side: int, states: Tensor) -> Tensor:
        if self._pads is None:
            return self._stores[0][side].update(states)
        length = states.shape[-2]
        result = states.new_zeros(*states.shape[:2], self.seen + length, states.shape[-1])
        for row, (store, pads) in enumerate(zip(self._stores, self._pads, strict=True)):
            new = states[row : row + 1, :, max(0, pads - self.seen) :]
            if new.shape[2]:
                seen = store[side].update(new)
                result[row : row + 1, :, -seen.shape[2] :] = seen
        return result

    def stored_bytes(self) -> int:
        return sum(side.stored_bytes for store in self._stores for side in store)

    def reset(self) -> None:
        self._stores, self._pads, self.seen, self.is_initialized = [], None, 0, False

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._pads is None:
            self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        else:
            rows = range(len(self._stores))
            self._select(torch.tensor(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._pads is None:
            self._map(lambda tensor: tensor[indices.to(tensor.device)])
        else:
            self._select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest -tokens_to_remove tokens; what was coded stays as it was coded.

        Raises:
            UsageError: a positive number, or tokens that are coded together with older ones.
        """
        count = self.removable(tokens_to_remove)
        if count == 0:
            return
        copies = [(keys.map(lambda t: t), values.map(lambda t: t)) for keys, values in self._stores]
        for row, store in enumerate(copies):
            held = self.seen - (self._pads[row] if self._pads else 0)
            for side in store:
                side.crop(min(count, max(0, held)))
        self._stores = copies  # only if no side refused
        self.seen -= count

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self._stores = [(keys.map(function), values.map(function)) for keys, values in self._stores]

    def _select(self, indices: Tensor) -> None:
        """Rows that are stored by themselves; a row chosen twice gets tensors of its own, as its bytes are counted."""
        chosen = indices.tolist()
        assert self._pads is not None
        self._pads = [self._pads[row] for row in chosen]
        stores = [self._stores[row] for row in chosen]
        self._stores = [(keys.map(Tensor.clone), values.map(Tensor.clone)) for keys, values in stores]
