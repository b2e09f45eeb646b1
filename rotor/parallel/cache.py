"""A cache that is spread over processes: each holds the rows of some tokens of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..errors import UsageError


@dataclass
class Seen:
    """What all processes know of a cache, the same in each; shared by its layers.

    counts: tokens that each process has stored. shifts: of each sequence, position less index of its tokens, where
    positions matter and one is known.
    """

    counts: list[int]
    shifts: Tensor | None = None

    @property
    def tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Share:
    """Which tokens of a pass this process stores.

    indices: in the whole sequence, of those that it was given. stored: whether it stores these, or none.
    """

    indices: Tensor
    stored: bool

    def of(self, key: Tensor, value: Tensor) -> Rows:
        """The share of rows [batch_size, 1, seq_len, width] of all tokens that the process was given."""
        count = len(self.indices) if self.stored else 0
        return Rows(key[:, :, :count], value[:, :, :count], self.indices[:count])


@dataclass(frozen=True)
class Rows:
    """Rows of some tokens, [batch_size, 1, n, width], and the indices of these in the whole sequence, [n]."""

    key: Tensor
    value: Tensor
    indices: Tensor


class SpreadLayer(DynamicLayer):
    """This process's rows of one layer, and the indices of their tokens. Its length is that of the whole sequence.

    Args:
        seen: shared by the layers of the cache. window: of a layer with a sliding window, which older rows leave.
    """

    is_croppable = False

    def __init__(self, seen: Seen, window: int | None) -> None:
        super().__init__()
        self.seen, self.window = seen, window
        self.indices = torch.empty(0, dtype=torch.long)

    def store(self, key: Tensor, value: Tensor, share: Share, newest: int) -> Rows:
        """Add this process's share of the rows of a pass, and drop those that no later query sees.

        Args:
            key, value: [batch_size, 1, seq_len, width], of all tokens that the process was given.
            newest: index of the last token of the sequence.
        Returns:
            The rows before any was dropped: queries of the pass itself may see them.
        """
        rows = share.of(key, value)
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            key, value = torch.cat([self.keys, rows.key], dim=2), torch.cat([self.values, rows.value], dim=2)
            rows = Rows(key, value, torch.cat([self.indices, rows.indices]))
        kept = rows
        if self.window is not None:
            left = rows.indices > newest + 1 - self.window  # what the next query sees
            kept = Rows(rows.key[:, :, left], rows.value[:, :, left], rows.indices[left])
        self.dtype, self.device, self.is_initialized = key.dtype, key.device, True
        self.keys, self.values, self.indices = kept.key.contiguous(), kept.value.contiguous(), kept.indices
        return rows

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise UsageError(
            "a cache that is spread over processes was used outside of sequence_parallel().",
            "Keep all passes over one cache inside of one `with sequence_parallel(model, group)`.",
        )

    def get_seq_length(self) -> int:
        return self.seen.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen.tokens + query_length, 0

    def reset(self) -> None:
        super().reset()
        self.indices = self.indices[:0]
        self.seen.counts[:] = [0] * len(self.seen.counts)
        self.seen.shifts = None

    def crop(self, tokens_to_remove: int) -> None:
        raise UsageError(
            "assisted decoding takes tokens back, which a cache that is spread over processes does not.",
            "Generate without an assistant or prompt look-up.",
        )


def windows_of(config: Any, count: int) -> list[int | None]:
    """The sliding window of each of a model's layers, None where there is none."""
    layers = DynamicCache(config=config).layers
    return [getattr(layers[i], "sliding_window", None) if i < len(layers) else None for i in range(count)]


def spread_layers(windows: list[int | None], processes: int) -> list[SpreadLayer]:
    """Empty layers of one cache, one for each of a model's."""
    seen = Seen([0] * processes)
    return [SpreadLayer(seen, window) for window in windows]


def seen_of(cache: Any) -> Seen:
    """What all know of a cache that `spread_layers` made."""
    seen: Seen = cache.layers[0].seen
    return seen
