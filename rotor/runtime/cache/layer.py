"""The cache layer of every policy: transformers' contract around two sides of coded tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ...errors import UsageError
from .store import Side, Stream


class CodedLayer(DynamicLayer):
    """One layer's cache, coded as two streams say.

    It works on a model's heads, and on a compressed model's packed rows [batch_size, 1, seq_len, width] of 16 bits.

    Args:
        streams: of keys and of values.
        padding: [batch_size], tokens of padding on the left of each row. With it each row is stored by itself, without
            its padding, so that what is stored of a row does not depend on the others. Beams of a row are expanded.

    Limits: attention decodes the whole cache at each step; not for static or assisted caches.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, streams: tuple[Stream, Stream], padding: Tensor | None = None) -> None:
        super().__init__()
        self.streams = streams
        self.seen = 0
        self._padding = padding
        self._pads: list[int] | None = None
        self._stores: list[tuple[Side, Side]] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not key_states.is_floating_point() or key_states.element_size() == 1:
            raise UsageError(
                f"a cache policy was given rows of {key_states.dtype}, which are codes already.",
                "Use no cache policy with this checkpoint, or a policy with a checkpoint of 16-bit columns.",
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        batch_size, rows = key_states.shape[0], 1
        if self._padding is not None:
            if batch_size % len(self._padding):
                raise UsageError(
                    f"the cache was made for a batch of {len(self._padding)} rows and is given {batch_size}.",
                    "Make a new cache for each batch, from its own attention mask.",
                )
            self._pads = self._padding.repeat_interleave(batch_size // len(self._padding)).tolist()
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
        """Bytes of all tensors that the layer holds: codes, scales, zeros, factors, indices, tokens not yet coded."""
        return sum(side.stored_bytes for store in self._stores for side in store)

    def get_seq_length(self) -> int:
        return self.seen

    def reset(self) -> None:
        self._stores, self._pads, self.seen, self.is_initialized = [], None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

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
        if tokens_to_remove > 0:
            raise UsageError(f"crop({tokens_to_remove}): expected a negative number, of tokens to remove.")
        count = min(-tokens_to_remove, self.seen)
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
