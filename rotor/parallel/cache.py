"""A cache that is split over processes: each holds the rows of some tokens of every layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..errors import UsageError


class Rows(NamedTuple):
    """Rows of some tokens, [batch_size, 1, n, width], and the tokens' indices in the whole sequence, [n]."""

    key: Tensor
    value: Tensor
    indices: Tensor


class ShardedLayer(DynamicLayer):
    """This process's rows of one layer and the indices of their tokens. Its length is that of the whole sequence.

    Args:
        counts: tokens that each process has stored; the layers of a cache share the list.
        window: of a layer with a sliding window, which drops older rows.
    """

    is_croppable = False

    def __init__(self, counts: list[int], window: int | None) -> None:
        super().__init__()
        self.counts, self.window = counts, window
        self.indices = torch.empty(0, dtype=torch.long)

    def store(self, rows: Rows, newest: int) -> Rows:
        """Add this process's rows of a pass, and drop rows that no later query sees.

        Args:
            newest: index of the last token of the sequence.
        Returns:
            The rows before any was dropped: queries of the pass itself may see them.
        """
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            key, value = torch.cat([self.keys, rows.key], dim=2), torch.cat([self.values, rows.value], dim=2)
            rows = Rows(key, value, torch.cat([self.indices, rows.indices]))
        kept = rows
        if self.window is not None:
            left = rows.indices > newest + 1 - self.window  # the next query sees them
            kept = Rows(rows.key[:, :, left], rows.value[:, :, left], rows.indices[left])
        self.dtype, self.device, self.is_initialized = rows.key.dtype, rows.key.device, True
        self.keys, self.values, self.indices = kept.key.contiguous(), kept.value.contiguous(), kept.indices
        return rows

    def update(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        raise UsageError(
            "a cache that is split over processes was used outside of sequence_parallel().",
            "Keep all passes over one cache inside of one `with sequence_parallel(model, group)`.",
        )

    def get_seq_length(self) -> int:
        return sum(self.counts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return sum(self.counts) + query_length, 0

    def reset(self) -> None:
        super().reset()
        self.indices = self.indices[:0]
        self.counts[:] = [0] * len(self.counts)

    def crop(self, tokens_to_remove: int) -> None:
        raise UsageError(
            "assisted decoding takes tokens back, which a cache that is split over processes does not.",
            "Generate without an assistant or prompt look-up.",
        )
