"""Policies that drop tokens: what the methods share, and the cache layer that keeps what they choose."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import UsageError
from ..format.layout import LayerLayout
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..runtime.rope import rows_of
from ..runtime.steps import Step, attend_to_rows
from .affine import AffineCode
from .budgets import SqueezeBudgets
from .codec import ByGroup, Codec, Exact, spans_of
from .column_sums import Softening, column_sums
from .layer import PolicyLayer, check_left, mask_of_places, tokens_shown
from .noise import noise_of
from .policy import Policy
from .store import Side, Stream

LAST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Held:
    """The tokens that a layer holds.

    index: places counted from each row's first token, [batch_size, 1 or groups, slots]; below 0: nothing there.
    scores: of the same shape, where the policy has any. layer: its index. generated: tokens after the first step.
    """

    index: Tensor
    scores: Tensor | None
    layer: int
    generated: int

    def noise(self, seed: int) -> Tensor:
        """A number from (0, 1) for each token, the same wherever its row lies."""
        return noise_of(self.index, seed, self.layer)


@dataclass(frozen=True)
class Eviction(Policy):
    """Keeps a budget of b tokens in each layer; what is over it is dropped after every step. Tokens stay at the places
    that they had.

    Args:
        share: of the prompt's tokens that are the budget. tokens: the budget in tokens, in place of a share.
        scope: `group`: each KV head (of a compressed model each group of heads) keeps tokens of its own; `layer`: all
            of a layer the same.
        squeeze: p of SqueezeAttention, by which budgets differ between layers; see rotor.policies.budgets.
        bits, group: codes of the rows that are kept, as the policy `per-token` has them: 16 (none), 8, 4, 3 or 2, in
            groups of so many columns. A token is exact in its own step.
        layer_shares: of the budget, for each layer, in place of `squeeze`; their mean should be 1.

    The prompt, the first step, sees itself whole and is then cut. Bytes: those of the kept rows (of codes
    bits / 8 + 4 / group a number), and an int32 place (and where there are scores a float32) for each kept token and
    group.
    Limits: a prompt that comes in several steps is cut after the first: give `tokens` then. A compressed model runs its
    PyTorch path.
    """

    evicts: ClassVar[bool] = True
    share: float = 0.5
    tokens: int | None = None
    scope: Literal["group", "layer"] = "group"
    squeeze: float | None = None
    layer_shares: tuple[float, ...] = ()
    bits: int = 16
    group: int = 64

    def __post_init__(self) -> None:
        self.require(0 < self.share <= 1, "share", "a share above 0, at most 1")
        self.require(self.tokens is None or self.tokens >= 1, "tokens", "null or at least 1")
        self.require(self.scope in ("group", "layer"), "scope", "group or layer")
        self.require(self.squeeze is None or 0 < self.squeeze <= 1, "squeeze", "null or a share above 0, at most 1")
        self.require(self.bits in (16, 8, 4, 3, 2), "bits", "one of (16, 8, 4, 3, 2)")
        self.require(self.group >= 1, "group", "at least 1")
        fits = all(share > 0 for share in self.layer_shares) and not (self.layer_shares and self.squeeze is not None)
        self.require(fits, "layer_shares", "positive numbers, and none beside squeeze")

    @property
    def longest_step(self) -> int | None:
        return 1

    @property
    def needs_states(self) -> bool:
        return self.squeeze is not None

    def layers(self, count: int) -> list[PolicyLayer]:
        fits = len(self.layer_shares) in (0, count)
        self.require(fits, "layer_shares", f"one for each of the model's {count} layers")
        found = [EvictingLayer(self, index) for index in range(count)]
        if self.squeeze is not None:
            budgets = SqueezeBudgets(self.squeeze, found)
            for layer in found:
                layer.budgets = budgets
        return list(found)

    def budget_of(self, prompt: Tensor, layer: int) -> Tensor:
        """Tokens that a layer keeps of prompts of so many, [batch_size] int64, before `squeeze`."""
        share = self.layer_shares[layer] if self.layer_shares else 1.0
        base = prompt * self.share if self.tokens is None else torch.full_like(prompt, self.tokens).double()
        return (base.double() * share).round().long().clamp(min=1)

    def check_rows(self, coded: bool) -> None:
        """Rows of codes are kept or dropped whole; they are not coded again."""
        if coded and self.bits < 16:
            raise UsageError(
                f"cache policy {self.method}: bits {self.bits}: this checkpoint's rows are codes already.",
                "Leave bits at 16, or use a recipe whose columns have 16 bits (rotor-16).",
            )

    @abstractmethod
    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the first and of the newest tokens stay, whatever their scores, of budgets [batch_size]."""

    def priority(self, held: Held) -> Tensor:
        """What is kept first, [batch_size, 1 or groups, slots]; of equals the older."""
        return held.index.float()


@dataclass(frozen=True)
class ScoringEviction(Eviction):
    """Keeps the tokens of the highest scores, which attention weights add to in every step, and the newest.

    Args:
        recent: share of the budget that the newest tokens have; the heavy hitters have the rest.
    """

    needs_weights: ClassVar[bool] = True
    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.recent <= 1, "recent", "a share from 0 to 1")

    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(budget), (budget * self.recent).round().long()

    def priority(self, held: Held) -> Tensor:
        assert held.scores is not None
        return held.scores

    def softening(self, held: Held) -> Softening:
        """What is done to a step's logits before the softmax whose columns are added to the scores: nothing."""
        return Softening()


class EvictingLayer(PolicyLayer):
    """One layer's cache that holds some of the tokens it was given.

    It works on a model's heads, on packed rows and on rows of codes.

    sides: keys and values, without what was dropped. places: [batch_size, 1 or groups, slots] int32, where the tokens
    are in the sequence; a row with fewer tokens than slots has places of -1. scores: [batch_size, 1 or groups, slots]
    float32, where the policy has any. start: [batch_size], the place of each row's first token.
    spans: of packed rows, the columns of each group in keys and in values.
    """

    in_pytorch = True
    stored = ("sides", "places", "scores")
    beside = ("start", "budget")
    sides: tuple[Side, Side]
    places: Tensor
    scores: Tensor | None
    start: Tensor
    budget: Tensor

    def __init__(self, policy: Eviction, index: int) -> None:
        super().__init__()
        self.policy, self.index = policy, index
        self.budgets: SqueezeBudgets | None = None
        self.spans: list[tuple[slice, ...]] | None = None
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._length = self._prompt = 0
        self._ragged = False
        if self.budgets is not None:
            self.budgets.reset()

    def attend(self, step: Step) -> Tensor:
        parameters, query, rotations = step.parameters, step.query, step.rotations
        self.begin(step.mask, len(step.value), seq_len_of(query), query.device)
        if self.spans is None:
            self.spans = spans_of(parameters.layout, query.element_size())
        mask = self.visible(step.mask, _groups_of_heads(parameters), None)
        if rotations.read is not None:
            rotations = rotations._replace(read=rows_of(rotations.read, self.places.clamp(min=0).long()))
        key, value = step.cache.update(step.key, step.value, step.layer_idx)
        softening = self.softening()
        output = attend_to_rows(step._replace(mask=mask, rotations=rotations), key, value)
        sums = None
        if softening is not None:
            sums = column_sums(query, key, parameters, rotations.read, mask, softening, self.newest)
        self.finish(sums)
        return output

    @property
    def newest(self) -> Tensor:
        """Which tokens of the step are not padding, [batch_size, length] bool; rows of padding alone too."""
        return self.places[:, 0, -self._length :] >= 0

    @property
    def held(self) -> Held:
        index = torch.where(self.places >= 0, self.places - self.start[:, None, None], -1)
        return Held(index, self.scores, self.index, self.seen - self._prompt)

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        new = torch.arange(self.seen, self.seen + length, dtype=torch.int32, device=device).expand(batch_size, -1)
        if mask is not None and length > 1:
            shown = check_left(tokens_shown(mask, batch_size)[:, -length:])
            new = torch.where(shown, new, -1)
            self._ragged = self._ragged or not bool(shown.all())
        if self.places is None:
            self.start = torch.full((batch_size,), -1, dtype=torch.int32, device=device)
            self.places = new.unsqueeze(1).contiguous()
        else:
            self.places = torch.cat([self.places, new.unsqueeze(1).expand(-1, self.places.shape[1], -1)], dim=2)
        first = torch.where(new >= 0, new, LAST).amin(-1)
        self.start = torch.where((self.start < 0) & (first < LAST), first, self.start)
        self._length = length

    def visible(self, mask: Tensor | None, head_groups: Tensor | None, additive: torch.dtype | None) -> Tensor | None:
        places = self.places
        assert places is not None
        if mask is None and not self._ragged and (self._length == 1 or self.seen == 0):
            return None
        if places.shape[1] > 1:
            assert head_groups is not None
            places = places[:, head_groups.to(places.device)]
        return mask_of_places(mask, places, self.seen, self._length, additive)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns the keys and values of what is held, in the order of `places`."""
        length, held = key_states.shape[2], self.sides[0].tokens if self.sides else 0
        if self.places is None or self._length != length or held + length != self.places.shape[2]:
            raise UsageError(
                f"cache policy {self.policy.method}: the model's attention does not know that its cache drops tokens.",
                "Give the model the policy first: rotor.use_cache_policy(model, policy).",
            )
        if self.sides is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.sides = Side(self._stream(0), key_states), Side(self._stream(1), value_states)
            self._prompt = length
        self.seen += length
        key, value = self.sides
        return key.update(key_states), value.update(value_states)

    def _stream(self, side: int) -> Stream:
        coded = self.policy.bits < 16
        codec: Codec = AffineCode(self.policy.bits, 1, self.policy.group) if coded else Exact()
        return Stream(codec if self.spans is None else ByGroup(codec, self.spans[side]), exact_step=coded)

    def follow(self, layout: LayerLayout, heads_per_kv: int, dtype: torch.dtype) -> None:
        self.spans = spans_of(layout, dtype.itemsize)

    def softening(self) -> Softening | None:
        """How the attention that this step's queries give is to be summed for `finish`; None: it is not needed."""
        if not isinstance(self.policy, ScoringEviction):
            return None
        self._spread_places()
        return self.policy.softening(self.held)

    def observe_weights(self, weights: Tensor | None) -> None:
        softening = self.softening()
        if weights is None or softening is None or self.sides is None:
            self.finish(None)
            return
        weights = weights.float().unflatten(1, (self.sides[0].num_heads, -1))
        if not softening.none:
            bias = 0.0 if softening.bias is None else softening.bias[:, :, None, None]
            weights = ((weights.log() + bias) / softening.temperature).softmax(-1)
        weights = torch.nan_to_num(weights) * self.newest[:, None, None, :, None]
        self.finish(weights.mean(2).sum(2))

    def _spread_places(self) -> None:
        """From now on each group has places of its own."""
        groups = self.sides[0].num_heads if self.spans is None else len(self.spans[0])
        if self.policy.scope == "group" and self.places.shape[1] < groups:
            self.places = self.places.expand(-1, groups, -1)

    def finish(self, sums: Tensor | None) -> None:
        """Attention is done: count scores, and drop what is over the budget.

        Args:
            sums: [batch_size, groups, slots], how much attention each token drew, softened as `softening` says.
        """
        self._spread_places()
        if sums is not None:
            held = 0 if self.scores is None else self.scores.shape[2]
            fresh = torch.zeros(*self.places.shape[:2], self.places.shape[2] - held, device=self.places.device)
            self.scores = fresh if self.scores is None else torch.cat([self.scores, fresh], dim=2)
            self.scores = self.scores + (sums.mean(1, keepdim=True) if self.policy.scope == "layer" else sums)
        if self.budget is None and self.seen == self._length:
            self.budget = self.policy.budget_of(self.newest.sum(-1), self.index)
        if self.budgets is None or self.budgets.done:
            self.evict()

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store a prompt whose attention is not known, and cut it, for counting bytes; of equals the older stays."""
        self.begin(None, len(key_states), key_states.shape[2], key_states.device)
        self.update(key_states, value_states)
        self._spread_places()
        self.scores = torch.zeros(self.places.shape) if self.policy.needs_weights else None
        self.budget = self.policy.budget_of(self.newest.sum(-1), self.index)
        self.evict()

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        if self.budgets is not None and self.seen == self._length:
            self.budgets.observe(self.index, before, after, self.newest)

    def evict(self) -> None:
        """Drop what is over the budget."""
        places, budget, held = self.places, self.budget.to(self.places.device), self.held
        there = held.index >= 0
        lengths = (self.seen - self.start)[:, None, None]
        first, newest = self.policy.protected(budget)
        safe = (held.index < first[:, None, None]) | (held.index >= lengths - newest[:, None, None])
        priority = self.policy.priority(held).expand(places.shape).masked_fill(safe, torch.inf)
        priority = priority.masked_fill(~there, -torch.inf)
        counts = torch.minimum(there.sum(-1), budget[:, None])
        kept = int(counts.max())
        if kept == places.shape[2]:
            return
        order = priority.argsort(dim=-1, descending=True, stable=True)[..., :kept]
        chosen = places.gather(-1, order)
        chosen = chosen.masked_fill(torch.arange(kept, device=chosen.device) >= counts[..., None], -1)
        self._ragged = self._ragged or bool((counts < kept).any())
        by_place = chosen.argsort(dim=-1, stable=True)
        order, self.places = order.gather(-1, by_place), chosen.gather(-1, by_place)
        self.scores = None if self.scores is None else self.scores.gather(-1, order)
        for side in self.sides:
            side.take(order)


def _groups_of_heads(parameters: AttentionParameters) -> Tensor:
    """[num_heads], the group of each query head, heads in the model's order."""
    groups = parameters.layout.groups
    of_kv_head = {head: index for index, group in enumerate(groups) for head in group.kv_heads}
    of_each = torch.tensor([of_kv_head[head] for head in range(len(of_kv_head))])
    return of_each.repeat_interleave(parameters.shape.heads_per_kv)
