"""Which tokens of a cache are important: one index for a layer that chooses and the layers that repeat its choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layer import check_left, seen_by_last
from .token_noise import TokenNoise

if TYPE_CHECKING:
    from .tiers import Tiers

PADDING, LOW, HIGH = 0, 1, 2
"""What a token is: nothing, unimportant, important."""


@dataclass(frozen=True)
class Move:
    """Where the rows of both tiers go. Entries below 0 take any row: nothing is there.

    seen: tokens of the cache afterwards. high, low: [batch_size, slots], indices of the rows that a tier has then: of
    the important ones before; of the unimportant ones before followed by those of `demoted`, which are indices of
    important rows. None: as they are.
    """

    seen: int
    high: Tensor | None
    demoted: Tensor
    low: Tensor | None


class TierIndex:
    """The tier of each token of the rows of a batch.

    Rows of a tier are in the order of their tokens, at the right end of as many slots as the longest row needs.

    Args:
        layer: the one that chooses. sharing: layers that go by this index, that one among them.

    tiers: [batch_size, seen] uint8. scores: [batch_size, slots of important tokens] float32, what tokens are chosen by;
    that of a slot with nothing in it is -inf. low_slots: of unimportant tokens.
    """

    def __init__(self, policy: Tiers, layer: int, sharing: int) -> None:
        self.policy, self.layer, self.sharing = policy, layer, sharing
        self.share = policy.important_of(layer)
        self.noise = TokenNoise(layer)
        self.reset()

    def reset(self) -> None:
        self.tiers: Tensor | None = None
        self.scores: Tensor | None = None
        self.low_slots = 0
        self._move: Move | None = None
        self._to_follow = 0
        self._known: dict[tuple[int, int], Tensor] | None = None  # places, while tokens are appended and not yet told

    @property
    def seen(self) -> int:
        """Tokens so far, padding included."""
        return 0 if self.tiers is None else self.tiers.shape[1]

    def append(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        """New tokens are important until it is known what they are worth; see PolicyLayer.begin for the arguments."""
        real = torch.ones(batch_size, length, dtype=torch.bool, device=device)
        if mask is not None and length > 1:
            real = seen_by_last(mask, batch_size)[:, -length:]
            check_left(real)
        new = torch.where(real, HIGH, PADDING).to(torch.uint8)
        self.tiers = new if self.tiers is None else torch.cat([self.tiers, new], dim=1)
        self._known = {}

    def places(self, tier: int, slots: int) -> Tensor:
        """Places of a tier's rows in the sequence, [batch_size, slots] int64, -1 where there is nothing."""
        assert self.tiers is not None
        known = {} if self._known is None else self._known
        if (tier, slots) not in known:
            known[tier, slots] = right_aligned(self.tiers == tier, slots)
        return known[tier, slots]

    def choose(self, log_sums: Tensor) -> None:
        """Tell important tokens from others, now that it is known what the newest tokens are worth.

        Of n tokens of a row the round(g n) with the largest scores are important, of those that were so far: columns
        that were cut do not come back. Of equals the older.

        Args:
            log_sums: [batch_size, length, num_heads], the log-sum-exp of each query head's logits.
        """
        assert self.tiers is not None
        length = log_sums.shape[1]
        held = 0 if self.scores is None else self.scores.shape[1]
        places = self.places(HIGH, held + length)
        there = places >= 0
        fresh = self._importance(log_sums).to(places.device)
        scores = fresh if self.scores is None else torch.cat([self.scores, fresh], dim=1)
        scores = scores.masked_fill(~there, -torch.inf)
        budget = ((self.tiers != PADDING).sum(-1).double() * self.share).round().long()
        order = scores.argsort(dim=-1, descending=True, stable=True)
        rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
        kept = there & (torch.empty_like(order).scatter_(-1, order, rank) < budget[:, None])
        self.scores = scores
        low, self._known = self.places(LOW, self.low_slots), None
        self._carry_out(places, kept, there & ~kept, low)

    def crop(self, count: int) -> None:
        """Forget the newest `count` tokens; those that were cut before stay cut."""
        assert self.tiers is not None
        assert self.scores is not None
        self._known, rest = None, self.seen - count
        high, low = self.places(HIGH, self.scores.shape[1]), self.places(LOW, self.low_slots)
        self.tiers = self.tiers[:, :rest].clone()
        nothing = torch.zeros_like(high, dtype=torch.bool)
        self._carry_out(high, (high >= 0) & (high < rest), nothing, low.masked_fill(low >= rest, -1), cropped=True)

    def select(self, indices: Tensor) -> None:
        """Rows of the batch by their indices."""
        self._known = None
        if self.tiers is not None:
            self.tiers = self.tiers[indices.to(self.tiers.device)]
        if self.scores is not None:
            self.scores = self.scores[indices.to(self.scores.device)]

    def take(self, seen: int) -> Move | None:
        """What was done last, for one of the layers that go by it; None where that does not lead to so many tokens."""
        move = self._move
        if move is None or move.seen != seen:
            return None
        self._to_follow -= 1
        if not self._to_follow:
            self._move = None  # what no layer needs any more is not kept with the cache
        return move

    def _carry_out(self, places: Tensor, kept: Tensor, demoted: Tensor, low: Tensor, cropped: bool = False) -> None:
        """Change tiers and scores, and say what becomes of the rows.

        Args:
            places: of the important rows, [batch_size, slots]. kept, demoted: which of these stay, and which are cut.
            low: places of the unimportant rows, -1 for those that go. cropped: whether there may be some.
        """
        assert self.tiers is not None
        assert self.scores is not None
        cut = right_aligned(demoted, int(demoted.sum(-1).amax()))
        unchanged = not cut.shape[1] and not cropped
        if unchanged:
            self._move, self._to_follow = Move(self.seen, None, cut, None), self.sharing
            return
        cut_places = _taken(places, cut).masked_fill(cut < 0, -1)
        marks = torch.zeros(len(cut), self.seen + 1, dtype=torch.bool, device=cut.device)
        marks = marks.scatter(-1, torch.where(cut_places >= 0, cut_places, self.seen), True)
        self.tiers = self.tiers.masked_fill(marks[:, :-1], LOW)
        both, order = torch.cat([low, cut_places], dim=1).sort(dim=-1, stable=True)
        self.low_slots = int((both >= 0).sum(-1).amax())
        first = both.shape[1] - self.low_slots
        low_rows = order[:, first:].masked_fill(both[:, first:] < 0, -1)
        high = right_aligned(kept, int(kept.sum(-1).amax()))
        self.scores = _taken(self.scores, high).masked_fill(high < 0, -torch.inf)
        self._move, self._to_follow = Move(self.seen, high, cut, low_rows), self.sharing

    def _importance(self, log_sums: Tensor) -> Tensor:
        """Of the newest tokens, [batch_size, length] float32."""
        assert self.tiers is not None
        importance = self.policy.importance
        length = log_sums.shape[1]
        index = (self.tiers != PADDING).cumsum(-1)[:, -length:] - 1  # in its row, without padding
        if importance == "random":
            return self.noise.of(index[:, None], self.policy.seed)[:, 0]
        found = torch.logsumexp(log_sums.float(), dim=-1)
        return found - (index + 1).clamp(min=1).log() if importance == "mean" else found


def right_aligned(chosen: Tensor, slots: int) -> Tensor:
    """Indices of the true entries of each row, ascending, in the last of so many slots, [rows, slots] int64; -1 before.

    Args:
        chosen: [rows, n] bool, in each row at most `slots` of them true.
    """
    count = chosen.sum(-1, keepdim=True)
    slot = chosen.cumsum(-1) - 1 + slots - count
    found = torch.full((len(chosen), slots + 1), -1, dtype=torch.int64, device=chosen.device)
    index = torch.arange(chosen.shape[1], device=chosen.device).expand_as(slot)
    found.scatter_(-1, torch.where(chosen, slot, slots), index)  # what is not chosen goes to a slot of its own
    return found[:, :slots]


def _taken(numbers: Tensor, index: Tensor) -> Tensor:
    return numbers.gather(-1, index.clamp(min=0))
