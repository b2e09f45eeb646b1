"""Policies that drop tokens: what the methods share, and the cache layer that keeps what they choose."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional

from ..errors import UnsupportedModelError
from ..format.layout import LayerLayout
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..runtime.families import FAMILIES
from ..runtime.rope import rows_of
from ..runtime.steps import Step, attend_to_rows
from .affine import AffineCode
from .budgets import SqueezeBudgets
from .column_sums import ScoreSoftmax, column_sums
from .layer import PolicyLayer, between, mask_of_places, noise_of, real_tokens
from .policy import Bits, Policy, Share
from .store import Codec, Exact, Side, Stream, spans_of

PositiveShare = Annotated[float, Field(gt=0, le=1)]
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
        positions: of kept keys, by which RoPE turns them: `sequence`, as they came; `cache`, counted anew among those
            that are kept, so that distances stay within what the model was trained on (StreamingLLM section 3.2).
        layer_shares: of the budget, for each layer, in place of `squeeze`; their mean should be 1.

    Keys of rows that are compressed after RoPE cannot be turned, nor those of a model without RoPE.
    The prompt, the first step, sees itself whole and is then cut. Bytes: those of the kept rows (of codes
    bits / 8 + 4 / group a number), and an int32 place (and where there are scores a float32) for each kept token and
    group.
    Limits: a prompt that comes in several steps is cut after the first: give `tokens` then. A compressed model runs its
    PyTorch path.
    """

    evicts: ClassVar[bool] = True
    share: PositiveShare = 0.5
    tokens: PositiveInt | None = None
    scope: Literal["group", "layer"] = "group"
    squeeze: PositiveShare | None = None
    layer_shares: tuple[PositiveFloat, ...] = ()
    bits: Bits = 16
    group: PositiveInt = 64
    positions: Literal["sequence", "cache"] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(not self.layer_shares or self.squeeze is None, "layer_shares", "none beside squeeze")

    @property
    def quantises(self) -> bool:
        return self.bits < 16

    @property
    def needs_states(self) -> bool:
        return self.squeeze is not None

    @property
    def turns_keys(self) -> bool:
        return self.positions == "cache"

    @property
    def tolerance(self) -> float:
        return 0.0 if self.squeeze is None else 0.02

    def check_rows(self, coded: bool, post_rope: bool) -> None:
        super().check_rows(coded, post_rope)
        if self.turns_keys and post_rope:
            raise self._cannot_turn("this checkpoint's keys are compressed after RoPE, which is in their latents")

    def check_config(self, config: Any) -> int:
        if self.turns_keys and FAMILIES[config.model_type].rotary is None:
            raise self._cannot_turn("this model has no RoPE")
        return super().check_config(config)

    def _cannot_turn(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"cache policy {self.method}: positions within the cache: {why}.",
            "Use `positions: sequence` in a YAML file of the policy, or a recipe with keys before RoPE (rotor).",
        )

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

    @abstractmethod
    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the first and of the newest tokens stay, whatever their scores, of budgets [batch_size]."""

    def priority(self, held: Held) -> Tensor:
        """What is kept first, [batch_size, 1 or groups, slots]; of equals the older."""
        return held.index.float()

    def score_softmax(self, held: Held) -> ScoreSoftmax | None:
        """What is done to a step's logits before the softmax whose columns are added to the scores."""
        return None


@dataclass(frozen=True)
class ScoringEviction(Eviction):
    """Keeps the tokens of the highest scores, which attention weights add to in every step, and the newest.

    Args:
        recent: share of the budget that the newest tokens have; the heavy hitters have the rest.
    """

    needs_weights: ClassVar[bool] = True
    recent: Share = 0.5

    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(budget), (budget * self.recent).round().long()

    def priority(self, held: Held) -> Tensor:
        assert held.scores is not None
        return held.scores


class EvictingLayer(PolicyLayer):
    """One layer's cache that holds some of the tokens it was given.

    It works on a model's heads, on packed rows and on rows of codes.

    sides: keys and values, without what was dropped; of packed rows each group's by itself. places: [batch_size, 1 or
    groups, slots] int32, where the tokens are in the sequence; a row with fewer tokens than slots has places of -1.
    scores: of the same shape, float32, where the policy has any. start: [batch_size], the place of each row's first
    token.
    spans: the columns of each group in keys and in values; of heads all.
    """

    in_pytorch = True
    stored = ("sides", "places", "scores")
    beside = ("start", "budget")
    sides: tuple[list[Side], ...]
    places: Tensor
    scores: Tensor | None
    start: Tensor
    budget: Tensor

    def __init__(self, policy: Eviction, index: int) -> None:
        super().__init__()
        self.policy, self.index = policy, index
        self.budgets: SqueezeBudgets | None = None
        self.spans: list[tuple[slice, ...]] = [(slice(None),)] * 2
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._length = self._prompt = 0
        self._ragged = False
        if self.budgets is not None:
            self.budgets.reset()

    def follow(self, layout: LayerLayout, dtype: torch.dtype) -> None:
        self.spans = spans_of(layout, dtype.itemsize)

    def attend(self, step: Step) -> Tensor:
        parameters, query, rotations = step.parameters, step.query, step.rotations
        self.begin(step.mask, len(step.value), seq_len_of(query), query.device)
        self.follow(parameters.layout, query.dtype)
        mask = self.visible(step.mask, _groups_of_heads(parameters))
        if rotations.read is not None:
            assert rotations.table is not None
            cos, sin = rows_of(rotations.read, self.places.clamp(min=0).long())
            if self.policy.turns_keys:
                more_cos, more_sin = between(rotations.table, self.moved)
                cos, sin = cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
            rotations = rotations._replace(read=(cos, sin))
        key, value = step.cache.update(step.key, step.value, step.layer_idx)
        output = attend_to_rows(step._replace(mask=mask, rotations=rotations), key, value)
        sums = None
        if self.policy.needs_weights:
            score_softmax = self.policy.score_softmax(self.held)
            sums = column_sums(query, key, parameters, rotations.read, mask, score_softmax, self.newest)
        self.finish(sums)
        return output

    @property
    def newest(self) -> Tensor:
        """Which tokens of the step are not padding, [batch_size, length] bool; rows of padding alone too."""
        return self.places[:, 0, -self._length :] >= 0

    @property
    def held(self) -> Held:
        index = torch.where(self.places >= 0, self.places - self.start[:, None, None], -1)
        return Held(index, self.scores, self.index, self.num_tokens - self._prompt)

    @property
    def moved(self) -> Tensor:
        """By how many positions each kept key moves towards the newest token, so that nothing lies between neighbours,
        [batch_size, 1 or groups, slots] int64."""
        there = self.places >= 0
        gaps = self.places - there.cumsum(-1)
        return (gaps[..., -1:] - gaps).masked_fill(~there, 0)

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        shown = real_tokens(mask, batch_size, length, device)
        self._ragged = self._ragged or not bool(shown.all())
        place = torch.arange(self.num_tokens, self.num_tokens + length, dtype=torch.int32, device=device)
        new = torch.where(shown, place, -1)
        if self.places is None:
            self.start = torch.full((batch_size,), -1, dtype=torch.int32, device=device)
            self.places = new.unsqueeze(1)
        else:
            self.places = torch.cat([self.places, new.unsqueeze(1).expand(-1, self.places.shape[1], -1)], dim=2)
        first = torch.where(new >= 0, new, LAST).amin(-1)
        self.start = torch.where((self.start < 0) & (first < LAST), first, self.start)
        self._length = length

    def visible(self, mask: Tensor | None, head_groups: Tensor) -> Tensor | None:
        if mask is None and not self._ragged and (self._length == 1 or self.num_tokens == 0):
            return None
        places = self.places if self.places.shape[1] == 1 else self.places[:, head_groups.to(self.places.device)]
        return mask_of_places(mask, places, self.num_tokens, self._length)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns the keys and values of what is held, in the order of `places`."""
        if self.sides is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            coded = self.policy.quantises
            codec: Codec = AffineCode(self.policy.bits, 1, self.policy.group) if coded else Exact()
            self.sides = tuple(
                [Side(Stream(codec, exact_step=coded), states[..., span]) for span in spans]
                for states, spans in zip((key_states, value_states), self.spans, strict=True)
            )
            self._prompt = key_states.shape[2]
            if self.policy.scope == "group":
                self.places = self.places.expand(-1, max(key_states.shape[1], len(self.spans[0])), -1)
        self.num_tokens += key_states.shape[2]
        key, value = (
            torch.cat([side.update(states[..., span]) for side, span in zip(sides, spans, strict=True)], -1)
            for states, sides, spans in zip((key_states, value_states), self.sides, self.spans, strict=True)
        )
        return self.turned(key, self.moved) if self.policy.turns_keys else key, value

    def observe_weights(self, weights: Tensor | None) -> None:
        if weights is None:
            self.finish(None)
            return
        weights = weights.float().unflatten(1, (self.sides[0][0].num_heads, -1))
        score_softmax = self.policy.score_softmax(self.held)
        if score_softmax is not None:
            weights = ((weights.log() + score_softmax.bias[:, :, None, None]) / score_softmax.temperature).softmax(-1)
        weights = torch.nan_to_num(weights) * self.newest[:, None, None, :, None]
        self.finish(weights.mean(2).sum(2))

    def finish(self, sums: Tensor | None) -> None:
        """Attention is done: count scores, and drop what is over the budget.

        Args:
            sums: [batch_size, groups, slots], how much attention each token drew, softened as the policy has it.
        """
        if sums is not None:
            sums = sums.mean(1, keepdim=True) if self.policy.scope == "layer" else sums
            if self.scores is not None:
                sums = sums + functional.pad(self.scores, (0, sums.shape[2] - self.scores.shape[2]))
            self.scores = sums
        if self.budget is None and self.num_tokens == self._length:
            self.budget = self.policy.budget_of(self.newest.sum(-1), self.index)
        if self.budgets is None or self.budgets.done:
            self.evict()

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store a prompt whose attention is not known, and cut it, for counting bytes; of equals the older stays."""
        self.begin(None, len(key_states), key_states.shape[2], key_states.device)
        self.update(key_states, value_states)
        self.scores = torch.zeros(self.places.shape) if self.policy.needs_weights else None
        self.budget = self.policy.budget_of(self.newest.sum(-1), self.index)
        self.evict()

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        if self.budgets is not None and self.num_tokens == self._length:
            self.budgets.observe(self.index, before, after, self.newest)

    def evict(self) -> None:
        """Drop what is over the budget."""
        places, budget, held = self.places, self.budget.to(self.places.device), self.held
        there = held.index >= 0
        lengths = (self.num_tokens - self.start)[:, None, None]
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
        for sides in self.sides:
            each = order.expand(-1, len(sides), -1).split(1, dim=1) if len(sides) > 1 else (order,)
            for side, own in zip(sides, each, strict=True):
                side.take(own)


def _groups_of_heads(parameters: AttentionParameters) -> Tensor:
    """[num_heads], the group of each query head, heads in the model's order."""
    kv_heads = torch.tensor(parameters.layout.kv_head_order).argsort() // parameters.layout.group_size
    return kv_heads.repeat_interleave(parameters.shape.heads_per_kv)
