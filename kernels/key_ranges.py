"""Which keys queries attend to, as the kernels want it: computed on the device, with no synchronisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeKeys:
    """The keys `first ... end - 1` of each sequence, without those that `mask` leaves out.

    first, end: [batch_size], int32. Left padding and sliding windows are ranges; a sequence with nothing is empty.
    mask, holes: [batch_size, kv_len], uint8 (1: attend), and [batch_size], int32: whether a range has keys
        that are not attended. The mask is only read where it has.
    """

    first: Tensor
    end: Tensor
    mask: Tensor | None = None
    holes: Tensor | None = None
    _prefixes: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def all_of(cls, batch_size: int, kv_len: int, device: torch.device, window: int | None = None) -> DecodeKeys:
        """The last `window` of kv_len keys, or all, for every sequence."""
        first = 0 if window is None else max(0, kv_len - window)
        return cls(
            torch.full((batch_size,), first, dtype=torch.int32, device=device),
            torch.full((batch_size,), kv_len, dtype=torch.int32, device=device),
        )

    @classmethod
    def from_mask(cls, mask: Tensor) -> DecodeKeys:
        """From a bool mask [batch_size, kv_len] (True: attend)."""
        from .masks import mask_ranges  # imports Triton

        first, end, holes, _ = mask_ranges(mask.unsqueeze(1), words=False)
        marks = mask if mask.stride(-1) == 1 else mask.contiguous()
        return cls(first.squeeze(1), end.squeeze(1), marks.view(torch.uint8), holes.squeeze(1))

    def tile_prefix(self, tile: int) -> Tensor:
        """[batch_size + 1], int64: tiles of keys in the sequences before each; tiles begin at multiples of `tile`."""
        if tile not in self._prefixes:
            from .masks import tile_prefix  # imports Triton

            self._prefixes[tile] = tile_prefix(self.first, self.end, tile)
        return self._prefixes[tile]


@dataclass(frozen=True)
class PrefillKeys:
    """The keys `first ... end - 1` of each query, without those that `mask` leaves out.

    first, end: [batch_size, seq_len], int32; queries behind a shorter sequence are empty ranges. Of packed queries
        [tokens].
    mask, holes: [batch_size, seq_len, words], int64, a bit a key, the lowest first (1: attend), and
        [batch_size, seq_len], int32: whether a query's range has keys that are not attended. The mask is only read
        where it has.
    past: keys before the queries' own as far as the host knows: only the order of launches goes by it.
    query_start_loc: of packed queries, [batch_size + 1], int32: where the queries of each sequence begin, and end.
    longest, longest_kv: of packed queries, the most of a sequence and the most keys of one, as far as the host knows
        (no less than there are; of keys 0 where it does not).
    tasks, plans: row blocks, and how their keys are split over programs, as `prefill.tasks` and `prefill.slices`
        remember them for all layers of a step.
    """

    first: Tensor
    end: Tensor
    mask: Tensor | None = None
    holes: Tensor | None = None
    past: int = 0
    query_start_loc: Tensor | None = None
    longest: int = 0
    longest_kv: int = 0
    tasks: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)
    plans: dict[tuple[int, int, int, int, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def batch_size(self) -> int:
        return self.first.shape[0] if self.query_start_loc is None else self.query_start_loc.shape[0] - 1

    @property
    def seq_len(self) -> int:
        """Queries of a sequence; of packed ones the most that one may have."""
        return self.first.shape[1] if self.query_start_loc is None else self.longest

    @cached_property
    def union(self) -> tuple[Tensor, Tensor]:
        """First and end of the keys that any query of a sequence attends to, both [batch_size], int32."""
        if self.query_start_loc is not None:
            start, until = self.query_start_loc[:-1].long(), self.query_start_loc[1:].long()
            first, end = self.first[start.clamp(max=len(self.first) - 1)], self.end[(until - 1).clamp(min=0)]
            return first, end.masked_fill(start == until, 0)
        some = self.first < self.end
        return self.first.masked_fill(~some, torch.iinfo(torch.int32).max).amin(-1), (self.end * some).amax(-1)

    @classmethod
    def causal(
        cls, query_len: Tensor, kv_start: Tensor, kv_end: Tensor, seq_len: int, window: int | None = None
    ) -> PrefillKeys:
        """The last `query_len` of the keys kv_start ... kv_end - 1 of each sequence are the queries' own.

        Args:
            query_len, kv_start, kv_end: [batch_size].
            seq_len: of the padded queries.
            window: a query attends to itself and the window - 1 keys before it.
        """
        index = torch.arange(seq_len, device=kv_end.device)
        end = index + (kv_end - query_len)[:, None] + 1
        first = kv_start[:, None].expand_as(end)
        if window is not None:
            first = torch.maximum(first, end - window)
        end = torch.where(index < query_len[:, None], end, 0)
        return cls(first.int().contiguous(), end.int())

    @classmethod
    def packed(
        cls,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        tokens: int,
        longest: int,
        longest_kv: int = 0,
        window: int | None = None,
    ) -> PrefillKeys:
        """Sequences of any lengths, their queries behind each other: the last keys of each are its queries' own.

        Args:
            query_start_loc: [batch_size + 1], int32, ascending: where the queries of each sequence begin among all
                tokens, and where the last one's end; sequences may have none, and tokens belong to no sequence.
            kv_lens: [batch_size]: keys of each sequence, the new ones among them.
            tokens: of the packed queries.
            longest, longest_kv: the most queries of a sequence that there may be, and the most keys, 0 if not known.
            window: a query attends to itself and the window - 1 keys before it.
        """
        token = torch.arange(tokens, device=kv_lens.device)
        until = query_start_loc[1:].contiguous()
        sequence = torch.searchsorted(until, token, right=True).clamp(max=len(until) - 1)
        left = until[sequence] - token  # queries from this one on
        end = torch.where((left > 0) & (token >= query_start_loc[0]), kv_lens[sequence] - left + 1, 0)
        first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
        return cls(first.int(), end.int(), query_start_loc=query_start_loc, longest=longest, longest_kv=longest_kv)

    @classmethod
    def from_mask(cls, mask: Tensor) -> PrefillKeys:
        """From a bool mask [batch_size, seq_len, kv_len] (True: attend)."""
        from .masks import mask_ranges  # imports Triton

        first, end, holes, words = mask_ranges(mask, words=True)
        return cls(first, end, words, holes, past=mask.shape[2] - mask.shape[1])
