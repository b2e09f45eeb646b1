"""Policies that drop tokens: what the methods share, and the cache layer that keeps the chosen tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn import functional

from ..checkpoint.layout import LayerLayout
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..runtime.rope import rows_of
from ..runtime.steps import AttentionCall, attend_to_rows
from .budgets import SqueezeBudgets
from .column_sums import ScoreSoftmax, column_sums
from .layer import PolicyLayer, StoredSequence, between, mask_of_places, right_aligned
from .policy import Policy, Share
from .store import spans_of

PositiveShare = Annotated[float, Field(gt=0, le=1)]

NOISE_BLOCK = 1024
"""Tokens whose random numbers are drawn together."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that a layer holds.

    index: positions counted from each sequence's first token, [batch_size, groups, slots]; below 0: an empty slot.
    scores: in the same shape, where the policy has any. layer: its index. generated: tokens after the first step.
    """

    index: Tensor
    scores: Tensor | None
    layer: int
    generated: int

    def noise(self, seed: int) -> Tensor:
        """A number from (0, 1) for each token that depends on the token alone; anything for an empty slot."""
        count = max(0, int(self.index.max())) // NOISE_BLOCK + 1
        blocks = [_noise_block(seed, self.layer, block, self.index.shape[1]) for block in range(count)]
        table = torch.cat(blocks, dim=1).to(self.index.device)
        return table.expand(len(self.index), -1, -1).gather(-1, self.index.clamp(min=0).long())


@lru_cache(maxsize=1024)
def _noise_block(seed: int, layer: int, block: int, groups: int) -> Tensor:
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + layer) * 1_000_003 + block) % 2**63)
    return torch.rand(groups, NOISE_BLOCK, generator=generator).clamp(1e-6, 1 - 1e-6)


@dataclass(frozen=True)
class Eviction(Policy):
    """Keeps a budget of b tokens in each layer, for each KV head (in a compressed model each group of heads) by itself.
    Tokens over the budget are dropped after every step. Kept tokens stay at their positions.

    Args:
        share: the budget as a share of the prompt's tokens. tokens: the budget in tokens, in place of a share.
        squeeze: p of SqueezeAttention, by which budgets differ between layers; see rotor.policies.budgets.

    The prompt, the first step, sees itself whole and is then cut. Bytes: the kept rows, and for each kept token and
    group an int32 position (and a float32 where there are scores).
    Limits: a prompt that comes in several steps is cut after the first: give `tokens` then. A compressed model runs its
    PyTorch path.
    """

    share: PositiveShare = 0.5
    tokens: PositiveInt | None = None
    squeeze: PositiveShare | None = None

    @property
    def needs_states(self) -> bool:
        return self.squeeze is not None

    def layers(self, count: int) -> list[PolicyLayer]:
        layers = [EvictingLayer(self, index) for index in range(count)]
        if self.squeeze is not None:
            budgets = SqueezeBudgets(self.squeeze, layers)
            for layer in layers:
                layer.budgets = budgets
        return list(layers)

    def budget_of(self, prompt: int) -> int:
        """Tokens that a layer keeps of a prompt of so many, before `squeeze`."""
        return max(1, round(prompt * self.share)) if self.tokens is None else self.tokens

    @abstractmethod
    def protected(self, budget: int) -> tuple[int, int]:
        """Numbers of first and of newest tokens that stay, whatever their scores."""

    def priority(self, held: KeptTokens) -> Tensor:
        """Priority by which tokens are kept, [batch_size, groups, slots]; among equals the older token stays."""
        return held.index.float()

    def score_softmax(self, held: KeptTokens) -> ScoreSoftmax | None:
        """Change a step's logits before the softmax whose columns are added to the scores."""
        return None


@dataclass(frozen=True)
class ScoringEviction(Eviction):
    """Keeps the newest tokens and those with the highest scores, the sums of attention weights over the steps.

    Args:
        recent: share of the budget that the newest tokens have; the heavy hitters have the rest.
    """

    needs_weights: ClassVar[bool] = True
    recent: Share = 0.5

    def protected(self, budget: int) -> tuple[int, int]:
        return 0, round(budget * self.recent)

    def priority(self, held: KeptTokens) -> Tensor:
        assert held.scores is not None
        return held.scores


class HeldSequence(StoredSequence):
    """Store of an evicting layer for one sequence.

    sides: keys and values of the kept tokens, [1, heads, slots, width]; packed rows by groups.
    index: [groups, slots] int32, positions of the tokens in the sequence. scores: in the same shape, float32, where the
    policy has any. budget: None before the prompt was read.
    """

    sides: Sequence[list[Tensor]] = ()
    index: Tensor
    scores: Tensor | None = None
    budget: int | None = None


class EvictingLayer(PolicyLayer):
    """A layer's cache that holds some of the tokens it was given: heads of a model, rows of numbers or rows of codes.

    spans: the elements of each group in key and value rows; all of a head.
    """

    in_pytorch = True
    new_sequence = HeldSequence
    sequences: list[HeldSequence]
    _generated: int

    def __init__(self, policy: Eviction, index: int) -> None:
        self.policy, self.index = policy, index
        self.budgets: SqueezeBudgets | None = None
        self.spans: list[tuple[slice, ...]] = [(slice(None),)] * 2
        super().__init__()

    def reset(self) -> None:
        super().reset()
        if self.budgets is not None:
            self.budgets.reset()

    def follow(self, layout: LayerLayout, dtype: torch.dtype) -> None:
        self.spans = spans_of(layout, dtype.itemsize)

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        parameters, query, rotations = call.parameters, call.query, call.rotations
        self.begin(call.mask, len(call.value), seq_len_of(query), query.device)
        self.follow(parameters.layout, query.dtype)
        mask = self.visible(call.mask, _groups_of_heads(parameters))
        if rotations.read is not None:
            cos, sin = rows_of(rotations.read, self.places.clamp(min=0).long())
            if self.policy.moves_keys:
                assert rotations.table is not None
                more_cos, more_sin = between(rotations.table, self.moved)
                cos, sin = cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
            rotations = rotations._replace(read=(cos, sin))
        key, value = call.cached()
        output = attend_to_rows(call._replace(mask=mask, rotations=rotations), key, value)
        sums = None
        if self.policy.needs_weights:
            score_softmax = self.policy.score_softmax(self.held)
            sums = column_sums(query, key, parameters, rotations.read, mask, score_softmax, self.newest)
        self.finish(sums)
        return output

    @property
    def places(self) -> Tensor:
        """Positions of the tokens in the padded batch, [batch_size, groups, slots] int32; -1 for an empty slot."""
        return right_aligned([(sequence.index + sequence.start)[None] for sequence in self.sequences], -1)

    @property
    def held(self) -> KeptTokens:
        # An offloaded layer has them on the CPU.
        index = right_aligned([sequence.index[None] for sequence in self.sequences], -1).to(self.device)
        scores = [sequence.scores[None] for sequence in self.sequences if sequence.scores is not None]
        scored = right_aligned(scores, 0).to(self.device) if scores else None
        return KeptTokens(index, scored, self.index, self._generated)

    @property
    def moved(self) -> Tensor:
        """Positions by which kept keys move towards the newest token to close gaps, [batch_size, groups, slots]."""
        places = self.places
        there = places >= 0
        gaps = places - there.cumsum(-1)
        return (gaps[..., -1:] - gaps).masked_fill(~there, 0)

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        first = not self.sequences
        super().begin(mask, batch_size, length, device)
        self._generated = 0 if first else self._generated + length
        for sequence in self.sequences:
            new = torch.arange(sequence.tokens - sequence.new, sequence.tokens, dtype=torch.int32, device=device)
            sequence.index = (
                new[None] if first else torch.cat([sequence.index, new.expand(len(sequence.index), -1)], dim=1)
            )

    def visible(self, mask: Tensor | None, head_groups: Tensor) -> Tensor | None:
        alike = len({sequence.index.shape[1] for sequence in self.sequences}) == 1
        if mask is None and alike and (self.length == 1 or self.num_tokens == 0):
            return None
        places = self.places
        places = places if places.shape[1] == 1 else places[:, head_groups.to(places.device)]
        return mask_of_places(mask, places, self.num_tokens, self.length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        key, value = super().update(key_states, value_states)
        return self.rotated(key, self.moved) if self.policy.moves_keys else key, value

    def store(self, sequence: HeldSequence, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens; returns keys and values of all tokens held, in the order of `index`."""
        new = [[states[..., span] for span in spans] for states, spans in zip((keys, values), self.spans, strict=True)]
        if not sequence.sides:
            sequence.sides = [[part[:, :, :0] for part in side] for side in new]
            sequence.index = sequence.index.expand(max(keys.shape[1], len(self.spans[0])), -1)
        sequence.sides = [
            [torch.cat(pair, dim=2) for pair in zip(*pairs, strict=True)]
            for pairs in zip(sequence.sides, new, strict=True)
        ]
        key, value = (torch.cat(side, dim=-1) for side in sequence.sides)
        return key, value

    def observe_weights(self, weights: Tensor | None) -> None:
        if weights is None:
            self.finish(None)
            return
        weights = weights.float().unflatten(1, (len(self.sequences[0].index), -1))
        score_softmax = self.policy.score_softmax(self.held)
        if score_softmax is not None:
            weights = ((weights.log() + score_softmax.bias[:, :, None, None]) / score_softmax.temperature).softmax(-1)
        weights = torch.nan_to_num(weights) * self.newest[:, None, None, :, None]
        self.finish(weights.mean(2).sum(2))

    def finish(self, sums: Tensor | None) -> None:
        """Add to the scores once attention is done, and drop tokens over the budget.

        Args:
            sums: [batch_size, groups, slots], attention that each token drew, at the temperature of the policy.
        """
        for row, sequence in enumerate(self.sequences):
            if sums is not None:
                before = sequence.index[:, :0].to(sums.dtype) if sequence.scores is None else sequence.scores
                held_sums = sums[row, :, sums.shape[2] - sequence.index.shape[1] :].to(before.device)
                sequence.scores = functional.pad(before, (0, sequence.new)) + held_sums
            if sequence.budget is None and sequence.tokens:
                sequence.budget = self.policy.budget_of(sequence.tokens)
        if self.budgets is None or self.budgets.done:
            self.evict()

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store a prompt of unknown attention and cut it, for counting bytes; among equals the older token stays."""
        self.update(key_states, value_states)
        budgets, self.budgets = self.budgets, None
        self.finish(torch.zeros(self.places.shape) if self.policy.needs_weights else None)
        self.budgets = budgets

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        if self.budgets is not None and self.num_tokens == self.length:
            self.budgets.observe(self.index, before, after, self.newest)

    def evict(self) -> None:
        """Drop tokens over the budget."""
        priorities = self.policy.priority(self.held)
        for sequence, priority in zip(self.sequences, priorities, strict=True):
            slots = sequence.index.shape[1]
            if sequence.budget is None or slots <= sequence.budget:
                continue
            first, newest = self.policy.protected(sequence.budget)
            safe = (sequence.index < first) | (sequence.index >= sequence.tokens - newest)
            held_priority = priority[:, priority.shape[1] - slots :].to(safe.device).masked_fill(safe, torch.inf)
            order = (
                held_priority.argsort(dim=-1, descending=True, stable=True)[:, : sequence.budget].sort(dim=-1).values
            )
            sequence.index = sequence.index.gather(-1, order)
            sequence.scores = None if sequence.scores is None else sequence.scores.gather(-1, order)
            for sides in sequence.sides:
                for group, kept in enumerate(order.split(len(order) // len(sides))):
                    index = kept[None, :, :, None].expand(-1, -1, -1, sides[group].shape[-1])
                    sides[group] = sides[group].gather(2, index)


def _groups_of_heads(parameters: AttentionParameters) -> Tensor:
    """The group of each query head, [num_heads], heads in the model's order."""
    kv_heads = torch.tensor(parameters.layout.kv_head_order).argsort() // parameters.layout.group_size
    return kv_heads.repeat_interleave(parameters.shape.heads_per_kv)
