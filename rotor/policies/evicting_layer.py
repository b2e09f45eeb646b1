"""The cache layer that keeps what an evicting policy chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import UsageError
from ..format.layout import LayerLayout
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..runtime.rope import rows_of
from ..runtime.steps import Step, attend_to_rows
from .budgets import SqueezeBudgets
from .codec import tensor_bytes
from .column_sums import Softening, column_sums
from .kept_codes import KeptCodes
from .layer import PolicyLayer, check_left, mask_of_places, seen_by_last
from .spans import slots_of, spans_of
from .token_noise import TokenNoise

if TYPE_CHECKING:
    from .eviction import Eviction


@runtime_checkable
class Scoring(Protocol):
    """A policy that scores tokens by the attention they draw."""

    def softening(self, layer: EvictingLayer) -> Softening:
        """What is done to this step's logits before the softmax whose columns are the scores."""


class EvictingLayer(PolicyLayer):
    """One layer's cache that holds some of the tokens it was given.

    It works on a model's heads, on packed rows and on rows of codes.

    keys, values: [batch_size, heads, slots, width]; of a policy that codes rows, those that are not yet coded.
    scores: [batch_size, 1 or groups, slots] float32, where the policy
    has any. start: [batch_size], the place of each row's first token. A row with fewer tokens than slots has places of
    -1.
    spans: of packed rows, the columns of each group in keys and values.
    """

    in_pytorch = True

    def __init__(self, policy: Eviction, index: int) -> None:
        super().__init__()
        self.policy, self.index = policy, index
        self.budgets: SqueezeBudgets | None = None
        self.spans: list[tuple[slice, slice]] | None = None
        self.scores: Tensor | None = None
        self.start: Tensor | None = None
        self.budget: Tensor | None = None
        self._places: Tensor | None = None
        self._length = self._prompt = 0
        self._ragged = False
        self.token_noise = TokenNoise(index)
        self._codes: list[KeptCodes] = []

    def attend(self, step: Step) -> Tensor:
        parameters, query, rotations = step.parameters, step.query, step.rotations
        self.begin(step.mask, len(step.value), seq_len_of(query), query.device)
        if self.spans is None:
            self.spans = spans_of(parameters.layout, query.element_size())
        mask = self.visible(step.mask, _groups_of_heads(parameters), None)
        if rotations.read is not None:
            assert self.positions is not None
            rotations = rotations._replace(read=rows_of(rotations.read, self.positions.clamp(min=0).long()))
        key, value = step.cache.update(step.key, step.value, step.layer_idx)
        softening = self.softening()
        output = attend_to_rows(step._replace(mask=mask, rotations=rotations), key, value)
        sums = None
        if softening is not None:
            sums = column_sums(query, key, parameters, rotations.read, mask, softening, self.newest)
        self.finish(sums)
        return output

    @property
    def positions(self) -> Tensor | None:
        return self._places

    @property
    def newest(self) -> Tensor:
        """Which tokens of the step are not padding, [batch_size, length] bool; rows of padding alone too."""
        assert self._places is not None
        return self._places[:, 0, -self._length :] >= 0

    @property
    def generated(self) -> int:
        """Tokens that came after the first step."""
        return self.seen - self._prompt

    @property
    def index_in_row(self) -> Tensor:
        """Places counted from each row's first token, [batch_size, 1 or groups, slots]; below 0: nothing there."""
        assert self._places is not None
        assert self.start is not None
        return torch.where(self._places >= 0, self._places - self.start[:, None, None], -1)

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        new = torch.arange(self.seen, self.seen + length, dtype=torch.int32, device=device).expand(batch_size, -1)
        if mask is not None and length > 1:
            shown = seen_by_last(mask, batch_size)[:, -length:]
            check_left(shown)
            new = torch.where(shown, new, -1)
            self._ragged = self._ragged or not bool(shown.all())
        new = new.unsqueeze(1)
        if self._places is None:
            self.start = torch.full((batch_size,), -1, dtype=torch.int32, device=device)
            self._places = new.contiguous()
        else:
            self._places = torch.cat([self._places, new.expand(-1, self._places.shape[1], -1)], dim=2)
        assert self.start is not None
        first = torch.where(new[:, 0] >= 0, new[:, 0], torch.iinfo(torch.int32).max).amin(-1)
        begun = (self.start < 0) & (first < torch.iinfo(torch.int32).max)
        self.start = torch.where(begun, first, self.start)
        self._length = length

    def visible(self, mask: Tensor | None, head_groups: Tensor | None, additive: torch.dtype | None) -> Tensor | None:
        places = self._places
        assert places is not None
        if mask is None and not self._ragged and (self._length == 1 or self.seen == 0):
            return None
        if head_groups is not None and places.shape[1] > 1:
            places = places[:, head_groups.to(places.device)]
        return mask_of_places(mask, places, self.seen, self._length, additive)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns the keys and values of what is held, in the order of `positions`."""
        length = key_states.shape[2]
        if self._places is None or self._length != length or self._held + length != self._places.shape[2]:
            raise UsageError(
                f"cache policy {self.policy.method}: the model's attention does not know that its cache drops tokens.",
                "Give the model the policy first: rotor.use_cache_policy(model, policy).",
            )
        if self.keys is None or self.values is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values, self._prompt = key_states, value_states, length
        else:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        self.seen += length
        if not self._codes:
            return self.keys, self.values
        coded = (codes.decode() for codes in self._codes)
        key, value = (torch.cat(both, dim=2) for both in zip(coded, (self.keys, self.values), strict=True))
        return key, value

    def follow(self, layout: LayerLayout, heads_per_kv: int, dtype: torch.dtype) -> None:
        self.spans = spans_of(layout, dtype.itemsize)

    @property
    def _held(self) -> int:
        exact = 0 if self.keys is None else self.keys.shape[2]
        return exact + (self._codes[0].tokens if self._codes else 0)

    @property
    def _groups(self) -> int:
        assert self.keys is not None
        if self.policy.scope == "layer":
            return 1
        return self.keys.shape[1] if self.spans is None else len(self.spans)

    def softening(self) -> Softening | None:
        """How the attention that this step's queries give is to be summed for `finish`; None: it is not needed."""
        if not isinstance(self.policy, Scoring):
            return None
        self._spread_places()
        return self.policy.softening(self)

    def sums_of(self, weights: Tensor) -> Tensor | None:
        """What `finish` takes, of weights [batch_size, groups, heads of a group, length, slots] float32."""
        softening = self.softening()
        if softening is None:
            return None
        if not softening.none:
            bias = 0.0 if softening.bias is None else softening.bias[:, :, None, None]
            weights = ((weights.log() + bias) / softening.temperature).softmax(-1)
        weights = torch.nan_to_num(weights) * self.newest[:, None, None, :, None]
        return weights.mean(2).sum(2)

    def _spread_places(self) -> None:
        """From now on each group has places of its own."""
        assert self._places is not None
        if self._places.shape[1] < self._groups:
            self._places = self._places.expand(-1, self._groups, -1)

    def finish(self, sums: Tensor | None) -> None:
        self._spread_places()
        assert self._places is not None
        if sums is not None:
            held = 0 if self.scores is None else self.scores.shape[2]
            fresh = torch.zeros(*self._places.shape[:2], self._places.shape[2] - held, device=self._places.device)
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
        assert self._places is not None
        self._places = self._places.expand(-1, self._groups, -1)
        self.scores = torch.zeros(self._places.shape) if self.policy.needs_weights else None
        self.budget = self.policy.budget_of(self.newest.sum(-1), self.index)
        self.evict()

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        if self.budgets is not None and self.seen == self._length:
            self.budgets.observe(self.index, before, after, self.newest)

    def evict(self) -> None:
        """Drop what is over the budget; of a policy that codes rows, code what is kept."""
        if self._codes:
            self._encode()
        self._drop()
        if self.policy.bits < 16:
            self._encode()

    def _encode(self) -> None:
        """Code the rows that came last."""
        assert self.keys is not None
        assert self.values is not None
        if not self.keys.shape[2]:
            return
        if not self._codes:
            sides = zip(*self.spans, strict=True) if self.spans is not None else (None, None)
            self._codes = [
                KeptCodes(self.policy.bits, self.policy.group, spans, like)
                for spans, like in zip(sides, (self.keys, self.values), strict=True)
            ]
        for codes, states in zip(self._codes, (self.keys, self.values), strict=True):
            codes.append(states)
        self.keys, self.values = self.keys[:, :, :0].clone(), self.values[:, :, :0].clone()

    def _drop(self) -> None:
        assert self._places is not None
        assert self.budget is not None
        places, budget = self._places, self.budget.to(self._places.device)
        index = self.index_in_row
        there = index >= 0
        assert self.start is not None
        lengths = (self.seen - self.start)[:, None, None]
        first, newest = self.policy.protected(budget)
        safe = (index < first[:, None, None]) | (index >= lengths - newest[:, None, None])
        priority = self.policy.priority(self).expand(places.shape).masked_fill(safe, torch.inf)
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
        order = order.gather(-1, by_place)
        self._places = chosen.gather(-1, by_place)
        if self.scores is not None:
            self.scores = self.scores.gather(-1, order)
        if self._codes:
            for codes in self._codes:
                codes.take(order)
        else:
            self.keys, self.values = self._taken(self.keys, order, 0), self._taken(self.values, order, 1)

    def _taken(self, states: Tensor | None, order: Tensor, side: int) -> Tensor:
        """The slots `order`, [batch_size, 1 or groups, kept], of [batch_size, heads, slots, width]."""
        assert states is not None
        if self.spans is None or order.shape[1] == 1:
            return slots_of(states, order)
        spans = enumerate(spans[side] for spans in self.spans)
        return torch.cat([slots_of(states[..., span], order[:, group : group + 1]) for group, span in spans], dim=-1)

    def noise(self, seed: int) -> Tensor:
        """A number from (0, 1) for each token, the same wherever its row lies, [batch_size, groups, slots]."""
        return self.token_noise.of(self.index_in_row, seed)

    def stored_bytes(self) -> int:
        coded = sum(codes.stored_bytes for codes in self._codes)
        return coded + tensor_bytes([self.keys, self.values, self._places, self.scores])

    def reset(self) -> None:
        self.keys = self.values = self.scores = self.start = self.budget = self._places = None
        self.seen = self._length = self._prompt = 0
        self.is_initialized = self._ragged = False
        self._codes = []
        if self.budgets is not None:
            self.budgets.reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, as long as nothing was dropped.

        Raises:
            UsageError: a positive number, or a token was dropped: it cannot come back.
        """
        count = self.removable(tokens_to_remove)
        if count == 0 or self._places is None:
            return
        if self._held != self.seen:
            raise UsageError(
                f"crop({-count}): this cache has dropped tokens, which cannot come back.",
                "Leave out what takes tokens back (assisted generation), or use a policy that keeps every token.",
            )
        rest = self.seen - count
        self._places, self.seen = self._places[..., :rest].clone(), rest
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = self.keys[:, :, :rest].clone(), self.values[:, :, :rest].clone()
        for codes in self._codes:  # by then none waits
            codes.cut(rest)
        self.scores = None if self.scores is None else self.scores[..., :rest].clone()

    def offload(self) -> None:
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            # Not in the background: `finish` chooses among the rows at once.
            self.keys, self.values = self.keys.cpu(), self.values.cpu()
            for codes in self._codes:
                codes.map(Tensor.cpu)

    def prefetch(self) -> None:
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys, self.values = (t.to(self.device, non_blocking=True) for t in (self.keys, self.values))
            for codes in self._codes:
                codes.map(lambda part: part.to(self.device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values", "scores", "start", "budget", "_places"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, function(tensor))
        for codes in self._codes:
            codes.map(function)


def _groups_of_heads(parameters: AttentionParameters) -> Tensor:
    """[num_heads], the group of each query head, heads in the model's order."""
    groups = parameters.layout.groups
    of_kv_head = {head: index for index, group in enumerate(groups) for head in group.kv_heads}
    of_each = torch.tensor([of_kv_head[head] for head in range(len(of_kv_head))])
    return of_each.repeat_interleave(parameters.shape.heads_per_kv)
