"""Tiers: important tokens keep more channels of their rows than others (ZDC's ratios per token)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...errors import UsageError
from ...format.layout import LayerLayout
from ...kernels.parameters import AttentionParameters, seq_len_of
from ...kernels.reference import join, partial_attention
from ...kernels.rotary import Rotation
from ...kernels.rows import cut_layer
from ...runtime.rope import rows_of
from ...runtime.steps import Step
from ..codec import slots_of
from ..layer import PolicyLayer, check_left, mask_of_places, tokens_shown
from ..noise import noise_of
from ..policy import Policy
from ..tier_rows import cut_layout, tier_rows

PADDING, LOW, HIGH = 0, 1, 2
"""What a token is: nothing, unimportant, important."""


@dataclass(frozen=True)
class Tiers(Policy):
    """In each layer a share g of the tokens is important. Of an important token's rows p^i is removed, of another's
    p^u: the last columns of each group, keys and values by ratios of their own. Rows of codes likewise, whose last
    columns are those of fewest bits.

    A token is worth its softmax denominator, summed over query heads: sum_h sum_k exp(s_k^h), s its logits as a query
    over the keys it sees; of n tokens the g n with the largest are important. The denominator is known after the
    layer's attention, which gives its logarithm anyway.

    Args:
        important: g. layer_important: g of each layer, in its place.
        qk_important, qk_unimportant: p_QK^i and p_QK^u, shares of a key latent's bytes that are removed.
        v_important, v_unimportant: p_VW^i and p_VW^u, of a value latent's; joint latents are keys'.
        importance: `denominator`, as above; `random`: a number drawn for each token, the control.
        seed: of the drawn numbers.

    A token's importance is settled against those before it: when g n tokens are more than there are room for, the least
    of the important ones loses channels for good. So generated tokens are ranked as the prompt's are.
    Bytes: those of both kinds of rows, a byte a token, and a float32 an important one.
    Limits: for compressed checkpoints, whose channels are nested; one that was refitted for its rank, or centred, is
    cut no better than another. Queries keep all channels: the paper cuts those of unimportant tokens too, which saves
    arithmetic and no cache. Post-RoPE codes give denominators without what the channels' means add to every logit of a
    query. Attention runs in plain PyTorch.
    Source: ZDC section 5.2. Its equation 6 asks for p^u < p^i and p_QK <= p_VW, its text for the opposite ("unimportant
    tokens have a higher p; the QK pair has more dimensions to drop"): the text, of which p^u >= p^i is required here.
    That layers repeat each other's choice did not hold of any model here, and is left out.
    """

    method: ClassVar[str] = "tiers"
    rows_only: ClassVar[bool] = True
    important: float = 0.5
    layer_important: tuple[float, ...] = ()
    qk_important: float = 0.0
    qk_unimportant: float = 0.5
    v_important: float = 0.0
    v_unimportant: float = 0.25
    importance: Literal["denominator", "random"] = "denominator"
    seed: int = 0

    def __post_init__(self) -> None:
        share = "a share from 0 to 1"
        self.require(0 <= self.important <= 1, "important", share)
        self.require(all(0 <= g <= 1 for g in self.layer_important), "layer_important", f"for each layer {share}")
        for side in ("qk", "v"):
            ratios = getattr(self, f"{side}_important"), getattr(self, f"{side}_unimportant")
            self.require(0 <= ratios[0] < 1, f"{side}_important", "a share from 0, below 1")
            expected = f"a share from {side}_important ({ratios[0]:g}), below 1"
            self.require(ratios[0] <= ratios[1] < 1, f"{side}_unimportant", expected)
        self.require(self.importance in ("denominator", "random"), "importance", "denominator or random")
        self.require(0 <= self.seed < 2**63, "seed", "a number from 0")

    @property
    def longest_step(self) -> int | None:
        return 1

    def layers(self, count: int) -> list[PolicyLayer]:
        fits = len(self.layer_important) in (0, count)
        self.require(fits, "layer_important", f"one for each of the model's {count} layers")
        return [TieredLayer(self, layer) for layer in range(count)]

    def layouts(self, layout: LayerLayout) -> tuple[LayerLayout, LayerLayout]:
        """Of the rows of important tokens, and of the others'."""
        return (
            cut_layout(layout, self.qk_important, self.v_important),
            cut_layout(layout, self.qk_unimportant, self.v_unimportant),
        )

    def check_rows(self, coded: bool) -> None:
        """Rows of codes are cut between nibbles."""


class TieredLayer(PolicyLayer):
    """One layer's cache in two blocks: rows of important tokens, and rows of others, with fewer channels.

    high_keys, high_values: rows of important tokens, in the order of their places, at the right end of as many slots
    as the longest row of the batch needs. low_keys, low_values: likewise of the others.
    tiers: [batch_size, seen] uint8, what each token is. scores: [batch_size, slots of important tokens] float32, what
    these are chosen by; -inf where a slot is empty.
    """

    in_pytorch = True
    stored = ("high_keys", "high_values", "low_keys", "low_values", "tiers", "scores")
    high_keys: Tensor
    high_values: Tensor
    low_keys: Tensor
    low_values: Tensor
    tiers: Tensor
    scores: Tensor

    def __init__(self, policy: Tiers, index: int) -> None:
        super().__init__()
        self.policy, self.index = policy, index
        self.important = policy.layer_important[index] if policy.layer_important else policy.important
        self._layout: tuple[LayerLayout, int] | None = None
        self._length = 0
        self.reset()

    def follow(self, layout: LayerLayout, heads_per_kv: int, dtype: torch.dtype) -> None:
        self._layout = layout, heads_per_kv

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        """New tokens are important until it is known what they are worth."""
        real = torch.ones(batch_size, length, dtype=torch.bool, device=device)
        if mask is not None and length > 1:
            real = check_left(tokens_shown(mask, batch_size)[:, -length:])
        new = torch.where(real, HIGH, PADDING).to(torch.uint8)
        self.tiers = new if self.tiers is None else torch.cat([self.tiers, new], dim=1)
        self._length = length

    def attend(self, step: Step) -> Tensor:
        parameters = step.parameters
        self.begin(step.mask, len(step.value), seq_len_of(step.query), step.query.device)
        self.follow(parameters.layout, parameters.shape.heads_per_kv, step.query.dtype)
        step.cache.update(step.key, step.value, step.layer_idx)
        output, log_sums = self.attention(parameters, step.query, step.mask, step.rotations.read)
        self.choose(log_sums)
        return output

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the rows of new tokens, which are important so far. Returns them."""
        length = key_states.shape[2]
        if self._layout is None or self._length != length or self.tiers.shape[1] != self.seen + length:
            raise UsageError(
                f"cache policy {self.policy.method}: the model's attention does not know that its cache has tiers.",
                "Load a checkpoint that `rotor export` wrote, and give it the policy with rotor.use_cache_policy().",
            )
        whole, (high, low) = self._layout[0], self.policy.layouts(self._layout[0])
        key, value = cut_layer(key_states, whole, high, keys=True), cut_layer(value_states, whole, high, keys=False)
        if self.high_keys is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.high_keys, self.high_values = key, value
            self.low_keys = cut_layer(key[:, :, :0], high, low, keys=True).clone()  # no view of what it is of
            self.low_values = cut_layer(value[:, :, :0], high, low, keys=False).clone()
        else:
            self.high_keys, self.high_values = (
                torch.cat([self.high_keys, key], dim=2),
                torch.cat([self.high_values, value], dim=2),
            )
        self.seen += length
        return key_states, value_states

    def attention(
        self, parameters: AttentionParameters, query: Tensor, mask: Tensor | None, key_rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """Attention to both blocks, each by itself, joined by its log-sum-exp.

        Args:
            parameters: of the layer, whole.
            query, mask, key_rotation: as in `reference.attention`, over all tokens so far.
        Returns:
            [batch_size, seq_len, sum over query heads of value width] in query's dtype, and the log-sum-exp of each
            query head's logits, [batch_size, seq_len, num_heads].
        """
        assert self._layout is not None
        widths = [group.values.width for group in parameters.layout.groups for _ in range(parameters.heads_per_group)]
        whole, heads_per_kv = self._layout
        outputs, log_sums = [], []
        blocks = (self.high_keys, self.high_values), (self.low_keys, self.low_values)
        in_order = [key.shape[2] for key, _ in blocks] in ([self.seen, 0], [0, self.seen])
        for tier, layout, (key, value) in zip((HIGH, LOW), self.policy.layouts(whole), blocks, strict=True):
            if not key.shape[2]:
                continue
            rows, seen_by, rotation = tier_rows(whole, layout, heads_per_kv, key.device), mask, key_rotation
            if not in_order:
                places = self._places(tier).unsqueeze(1)
                if mask is not None or self._length > 1 or not bool((places >= 0).all()):
                    seen_by = mask_of_places(mask, places, self.seen - self._length, self._length, None)
                rotation = None if key_rotation is None else rows_of(key_rotation, places.clamp(min=0))
            own, queries = rows.reading(parameters, query)
            output, log_sum = partial_attention(queries, key, value, own, rotation, seen_by)
            if output.shape[-1] < sum(widths):  # what is cut is 0
                zeros = output.new_zeros(*output.shape[:-1], sum(widths))
                output = zeros.index_copy_(-1, rows.output, output)
            outputs.append(output)
            log_sums.append(log_sum)
        found, log_sum = (outputs[0], log_sums[0]) if len(outputs) == 1 else join(outputs, log_sums, widths)
        return found.to(query.dtype), log_sum

    def choose(self, log_sums: Tensor) -> None:
        """Tell important tokens from others, now that it is known what the newest tokens are worth.

        Of n tokens of a row the round(g n) with the largest scores are important, of those that were so far: columns
        that were cut do not come back. Of equals the older.

        Args:
            log_sums: [batch_size, length, num_heads], the log-sum-exp of each query head's logits.
        """
        places = self._places(HIGH)
        there = places >= 0
        fresh = self._importance(log_sums).to(places.device)
        scores = fresh if self.scores is None else torch.cat([self.scores, fresh], dim=1)
        self.scores = scores.masked_fill(~there, -torch.inf)
        budget = (self.tiers.ne(PADDING).sum(-1).double() * self.important).round().long()
        order = self.scores.argsort(dim=-1, descending=True, stable=True)
        rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
        demoted = there & (torch.empty_like(order).scatter_(-1, order, rank) >= budget[:, None])
        if bool(demoted.any()):
            marks = torch.zeros(len(places), self.seen + 1, dtype=torch.bool, device=places.device)
            marks.scatter_(-1, torch.where(demoted, places, self.seen), True)  # a place of its own for what stays
            self._arrange(self.tiers.masked_fill(marks[:, :-1], LOW))

    def _importance(self, log_sums: Tensor) -> Tensor:
        """Of the newest tokens, [batch_size, length] float32."""
        if self.policy.importance == "denominator":
            return torch.logsumexp(log_sums.float(), dim=-1)
        index = self.tiers.ne(PADDING).cumsum(-1)[:, -log_sums.shape[1] :] - 1  # in its row, without padding
        return noise_of(index[:, None], self.policy.seed, self.index)[:, 0]

    def _arrange(self, tiers: Tensor) -> None:
        """Take the rows where the new tiers say that they belong."""
        assert self._layout is not None
        cut = _right_aligned(self.tiers.eq(HIGH) & tiers.eq(LOW))
        high, low = _right_aligned(tiers.eq(HIGH)), _right_aligned(tiers.eq(LOW))
        before, low_before = self._places(HIGH), torch.cat([self._places(LOW), cut], dim=1)
        slots, cut_slots, low_slots = (
            _slots(before, high, self.seen),
            _slots(before, cut, self.seen),
            _slots(low_before, low, self.seen),
        )
        layouts = self.policy.layouts(self._layout[0])
        for name in ("keys", "values"):
            rows, low_rows = getattr(self, f"high_{name}"), getattr(self, f"low_{name}")
            shorter = cut_layer(slots_of(rows, cut_slots), *layouts, keys=name == "keys")
            setattr(self, f"low_{name}", slots_of(torch.cat([low_rows, shorter], dim=2), low_slots))
            setattr(self, f"high_{name}", slots_of(rows, slots))
        self.scores = self.scores.gather(-1, slots[:, 0]).masked_fill(high < 0, -torch.inf)
        self.tiers = tiers

    def _places(self, tier: int) -> Tensor:
        """Places of a tier's rows in the sequence, [batch_size, slots] int64, -1 where there is nothing."""
        rows = self.high_keys if tier == HIGH else self.low_keys
        return _right_aligned(self.tiers.eq(tier), rows.shape[2])

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        self.begin(None, len(key_states), key_states.shape[2], key_states.device)
        self.update(key_states, value_states)
        self.choose(torch.zeros(len(key_states), key_states.shape[2], 1, device=key_states.device))


def _right_aligned(chosen: Tensor, slots: int | None = None) -> Tensor:
    """Indices of the true entries of each row, ascending, in the last of so many slots, [rows, slots] int64; -1 before.

    Args:
        chosen: [rows, n] bool, in each row at most `slots` of them true; by default the most that there are.
    """
    count = chosen.sum(-1, keepdim=True)
    slots = int(count.amax()) if slots is None else slots
    slot = chosen.cumsum(-1) - 1 + slots - count
    found = torch.full((len(chosen), slots + 1), -1, dtype=torch.int64, device=chosen.device)
    index = torch.arange(chosen.shape[1], device=chosen.device).expand_as(slot)
    found.scatter_(-1, torch.where(chosen, slot, slots), index)  # what is not chosen goes to a slot of its own
    return found[:, :slots]


def _slots(before: Tensor, places: Tensor, tokens: int) -> Tensor:
    """The slots of `places`, [batch_size, 1, kept], of rows at the places `before`; any slot for a place below 0."""
    table = torch.zeros(len(before), tokens + 1, dtype=torch.int64, device=before.device)
    index = torch.arange(before.shape[1], device=before.device).expand_as(before)
    table.scatter_(-1, torch.where(before >= 0, before, tokens), index)
    return table.gather(-1, torch.where(places >= 0, places, tokens)).unsqueeze(1)
