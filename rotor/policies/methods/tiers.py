"""Tiers: important tokens keep more channels of their rows than others (ZDC's ratios per token)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from ...format.layout import LayerLayout
from ...kernels.parameters import AttentionParameters, seq_len_of
from ...kernels.reference import join, partial_attention
from ...kernels.rotary import Rotation
from ...kernels.rows import cut_layer
from ...runtime.rope import rows_of
from ...runtime.steps import Step
from ..layer import PolicyLayer, mask_of_places, noise_of, real_tokens
from ..policy import Policy, Seed, Share
from ..store import slots_of
from ..tier_rows import cut_layout, tier_rows

Rows = tuple[Tensor, Tensor]
"""Of keys and of values."""

Removed = Annotated[float, Field(ge=0, lt=1)]

ORDER = (
    *(("qk_important", "qk_unimportant"), ("v_important", "v_unimportant")),
    *(("v_important", "qk_important"), ("v_unimportant", "qk_unimportant")),
)
"""Pairs of ratios of which the first is never the larger."""

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
    tokens have a higher p; the QK pair has more dimensions to drop"): the text is required here, and g that never falls
    with the layers, in both. That layers repeat each other's choice did not hold of any model here, and is left out.
    """

    method: ClassVar[str] = "tiers"
    rows_only: ClassVar[bool] = True
    important: Share = 0.5
    layer_important: tuple[Share, ...] = ()
    qk_important: Removed = 0.0
    qk_unimportant: Removed = 0.5
    v_important: Removed = 0.0
    v_unimportant: Removed = 0.25
    importance: Literal["denominator", "random"] = "denominator"
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for small, large in ORDER:
            least = getattr(self, small)
            self.require(least <= getattr(self, large), large, f"at least {small} ({least:g})")
        rises = list(self.layer_important) == sorted(self.layer_important)
        self.require(
            rises, "layer_important", "shares that fall with no layer, as deeper ones have more important tokens"
        )

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


class TieredLayer(PolicyLayer):
    """One layer's cache in two blocks: rows of important tokens, and rows of others, with fewer channels.

    high: key and value rows of important tokens, in the order of their places, at the right end of as many slots as the
    longest row of the batch needs. low: likewise of the others. tiers: [batch_size, tokens] uint8, what each token is.
    scores: [batch_size, slots of important tokens] float32, what these are chosen by; -inf where a slot is empty.
    """

    in_pytorch = True
    stored = ("high", "low", "tiers", "scores")
    high: Rows
    low: Rows
    tiers: Tensor
    scores: Tensor

    def __init__(self, policy: Tiers, index: int) -> None:
        super().__init__()
        self.policy, self.index = policy, index
        self.important = policy.layer_important[index] if policy.layer_important else policy.important
        self.reset()

    def follow(self, layout: LayerLayout, dtype: torch.dtype) -> None:
        self.layout, self.layouts = layout, self.policy.layouts(layout)

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        """New tokens are important until it is known what they are worth."""
        new = torch.where(real_tokens(mask, batch_size, length, device), HIGH, PADDING).to(torch.uint8)
        self.tiers = new if self.tiers is None else torch.cat([self.tiers, new], dim=1)

    def attend(self, step: Step) -> Tensor:
        self.begin(step.mask, len(step.value), seq_len_of(step.query), step.query.device)
        self.follow(step.parameters.layout, step.query.dtype)
        step.cache.update(step.key, step.value, step.layer_idx)
        output, log_sums = self.attention(step.parameters, step.query, step.mask, step.rotations.read)
        self.choose(log_sums)
        return output

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the rows of new tokens, which are important so far. Returns them."""
        if self.high is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            empty = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
            self.high, self.low = (_cut(empty, self.layout, layout) for layout in self.layouts)
        self.high = _behind(self.high, _cut((key_states, value_states), self.layout, self.layouts[0]))
        self.num_tokens += key_states.shape[2]
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
        widths = [group.values.width for group in parameters.layout.groups for _ in range(parameters.heads_per_group)]
        outputs, log_sums, length = [], [], seq_len_of(query)
        in_order = (self.high[0].shape[2], self.low[0].shape[2]) in ((self.num_tokens, 0), (0, self.num_tokens))
        for tier, layout, (key, value) in zip((HIGH, LOW), self.layouts, (self.high, self.low), strict=True):
            if not key.shape[2]:
                continue
            shown, rotation = mask, key_rotation
            if not in_order:
                places = self._places(tier).unsqueeze(1)
                if mask is not None or length > 1 or not bool((places >= 0).all()):
                    shown = mask_of_places(mask, places, self.num_tokens - length, length)
                rotation = None if key_rotation is None else rows_of(key_rotation, places.clamp(min=0))
            rows = tier_rows(self.layout, layout, parameters.shape.heads_per_kv, key.device)
            own, queries = rows.reading(parameters, query)
            output, log_sum = partial_attention(queries, key, value, own, rotation, shown)
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
        there = self._places(HIGH) >= 0
        fresh = self._importance(log_sums).to(there.device)
        scores = fresh if self.scores is None else torch.cat([self.scores, fresh], dim=1)
        self.scores = scores.masked_fill(~there, -torch.inf)
        budget = (self.tiers.ne(PADDING).sum(-1).double() * self.important).round()
        rank = self.scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        kept = there & (rank < budget[:, None])
        if not torch.equal(kept, there):
            self._cut_others(kept, there & ~kept)

    def _importance(self, log_sums: Tensor) -> Tensor:
        """Of the newest tokens, [batch_size, length] float32."""
        if self.policy.importance == "denominator":
            return torch.logsumexp(log_sums.float(), dim=-1)
        index = self.tiers.ne(PADDING).cumsum(-1)[:, -log_sums.shape[1] :] - 1  # in its row, without padding
        return noise_of(index[:, None], self.policy.seed, self.index)[:, 0]

    def _cut_others(self, kept: Tensor, others: Tensor) -> None:
        """Move rows to the block of fewer channels: `others`, [batch_size, slots of important tokens] bool."""
        slots, cut_slots = _right_aligned(kept), _right_aligned(others)
        cut_places = self._places(HIGH).gather(-1, cut_slots.clamp(min=0)).masked_fill(cut_slots < 0, -1)
        places = torch.cat([self._places(LOW), cut_places], dim=1)
        order = places.argsort(dim=-1)[:, places.shape[1] - int((places >= 0).sum(-1).max()) :]
        shorter = _cut(_chosen(self.high, cut_slots), *self.layouts)
        self.low, self.high = _chosen(_behind(self.low, shorter), order), _chosen(self.high, slots)
        self.scores = self.scores.gather(-1, slots.clamp(min=0)).masked_fill(slots < 0, -torch.inf)
        # Slots without a token write to a place before the first.
        self.tiers = functional.pad(self.tiers, (1, 0)).scatter(-1, cut_places + 1, LOW)[:, 1:].clone()

    def _places(self, tier: int) -> Tensor:
        """Places of a tier's rows in the sequence, [batch_size, slots] int64, -1 where there is nothing."""
        return _right_aligned(self.tiers.eq(tier), (self.high if tier == HIGH else self.low)[0].shape[2])

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        self.begin(None, len(key_states), key_states.shape[2], key_states.device)
        self.update(key_states, value_states)
        self.choose(torch.zeros(len(key_states), key_states.shape[2], 1, device=key_states.device))


def _cut(rows: Rows, outer: LayerLayout, inner: LayerLayout) -> Rows:
    return cut_layer(rows[0], outer, inner, keys=True), cut_layer(rows[1], outer, inner, keys=False)


def _behind(first: Rows, second: Rows) -> Rows:
    return torch.cat([first[0], second[0]], dim=2), torch.cat([first[1], second[1]], dim=2)


def _chosen(rows: Rows, slots: Tensor) -> Rows:
    """The rows in some slots, [batch_size, kept]; of a slot below 0 any."""
    slots = slots.clamp(min=0).unsqueeze(1)
    return slots_of(rows[0], slots), slots_of(rows[1], slots)


def _right_aligned(chosen: Tensor, slots: int | None = None) -> Tensor:
    """Indices of the true entries of each row, ascending, in the last of so many slots, [rows, slots] int64; -1 before.

    Args:
        chosen: [rows, n] bool, in each row at most `slots` of them true; by default the most that there are.
    """
    slots = int(chosen.sum(-1).max()) if slots is None else slots
    order = chosen.to(torch.uint8).argsort(dim=-1, stable=True)[:, chosen.shape[1] - slots :]
    return torch.where(chosen.gather(-1, order), order, -1)
