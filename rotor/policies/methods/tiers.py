"""Tiers: important tokens keep more channels of their rows than others (ZDC's ratios per token)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor
from torch.nn import functional

from ...checkpoint.layout import GroupLayout, LayerLayout
from ...checkpoint.rows import NIBBLE_BITS, UNIT_NIBBLES, WIDTHS, WORD_NIBBLES, CodedRow, NumberRow, Row
from ...kernels.parameters import AttentionParameters, resize_layer, seq_len_of
from ...kernels.reference.attention import join, partial_attention
from ...kernels.rotary import Rotation
from ...runtime.steps import AttentionCall
from ..layer import PolicyLayer, StoredSequence, behind_padding, right_aligned
from ..policy import Policy, Share

Rows = tuple[Tensor, Tensor]
"""Key rows and value rows."""

Removed = Annotated[float, Field(ge=0, lt=1)]

ORDER = (
    *(("qk_important", "qk_unimportant"), ("v_important", "v_unimportant")),
    *(("v_important", "qk_important"), ("v_unimportant", "qk_unimportant")),
)
"""Pairs of ratios whose first is at most the second."""

RATIOS = ("qk_important", "qk_unimportant", "v_important", "v_unimportant")

SCORE_BYTES = 4
"""Bytes of an important token's score."""


@dataclass(frozen=True)
class Tiers(Policy):
    """A share g of each layer's tokens is important. Rows of important tokens lose a share p^i, others a share p^u: the
    last channels of each group, with ratios for keys and for values. In rows of codes the last channels are those
    of fewest bits.

    A token is worth its softmax denominator, summed over query heads: sum_h sum_k exp(s_k^h), s its logits as a query
    over the keys it sees. The g n tokens of n with the largest are important. Attention yields the logarithm of the
    denominator anyway.

    Args:
        important: g. layer_important: g of each layer, which replaces `important`.
        shared_with: of each layer, the one whose important tokens it takes, itself where it chooses; empty: all choose.
        share_above: an export that searches lets a layer take the choice of an earlier one where more than this share
            of their important tokens is the same (the paper: 0.95); null: none does.
        search: an export with an accuracy searches g and the ratios that keep it, from these on.
        search_by: `bisection` along few proportions; `oracle`: the best of a grid of g and ratios; `regression`: what a
            regression on the grid's best for several losses gives for the loss that is asked.
        qk_important, qk_unimportant: p_QK^i and p_QK^u, shares of a key latent's bytes that are removed.
        v_important, v_unimportant: p_VW^i and p_VW^u, of a value latent's; joint latents are keys'.

    Tokens are ranked against earlier ones: once more than g n are important, the least of them loses channels for good.
    So generated tokens are ranked as the prompt's are.
    Bytes: both kinds of rows, a byte a token, and a float32 an important token.
    Limits: for compressed checkpoints, whose channels are nested; one that was refitted for its rank is cut no better.
    Attention runs in plain PyTorch: where rows are numbers after RoPE or without it over each kind of rows at its own
    width, joined by log-sum-exp; elsewhere over all rows at full width, with what was cut filled up.
    Queries meet the first channels of each kind: the paper cuts those of unimportant tokens further, to which
    a token belongs once its query has met all keys. With
    post-RoPE codes the denominators lack what the channels' means add to every logit of a query.
    Source: ZDC section 5.2. Its equation 6 asks for p^u < p^i and p_QK <= p_VW, its text for the opposite ("unimportant
    tokens have a higher p; the QK pair has more dimensions to drop"): the text is required here, and g that never falls
    with the layers, in both. That layers repeat each other's choice did not hold of any model here.
    """

    method: ClassVar[str] = "tiers"
    rows_only: ClassVar[bool] = True
    important: Share = 0.5
    layer_important: tuple[Share, ...] = ()
    qk_important: Removed = 0.0
    qk_unimportant: Removed = 0.5
    v_important: Removed = 0.0
    v_unimportant: Removed = 0.25
    shared_with: tuple[NonNegativeInt, ...] = ()
    share_above: Share | None = None
    search: bool = False
    search_by: Literal["bisection", "regression", "oracle"] = "bisection"

    def __post_init__(self) -> None:
        super().__post_init__()
        for small, large in ORDER:
            least = getattr(self, small)
            self.require(least <= getattr(self, large), large, f"at least {small} ({least:g})")
        taken = self.shared_with
        earlier = all(of <= layer and taken[of] == of for layer, of in enumerate(taken))
        self.require(earlier, "shared_with", "for each layer itself, or an earlier layer that chooses")
        rises = list(self.layer_important) == sorted(self.layer_important)
        self.require(
            rises, "layer_important", "shares that fall with no layer, as deeper ones have more important tokens"
        )

    def layers(self, count: int) -> list[PolicyLayer]:
        fits = len(self.layer_important) in (0, count)
        self.require(fits, "layer_important", f"one for each of the model's {count} layers")
        self.require(len(self.shared_with) in (0, count), "shared_with", f"one for each of the model's {count} layers")
        layers = [TieredLayer(self, share) for share in self.shares(count)]
        for index, of in enumerate(self.shared_with):
            layers[index].leader = layers[of] if of != index else None
        return list(layers)

    def shares(self, count: int) -> tuple[float, ...]:
        """g of each of `count` layers."""
        important = self.layer_important or (self.important,) * count
        return tuple(important[layer] for layer in self.shared_with) or important

    @property
    def in_words(self) -> str:
        """The shares of important tokens and the ratios, such as `g 0.4, QK 0.20 and 0.35, V 0.20 and 0.35`."""
        low, high = min(self.shares(1)), max(self.shares(1))
        shares = f"g {low:g}" if low == high else f"g {low:g} to {high:g}"
        qk, v = (
            f"{self.qk_important:.2f} and {self.qk_unimportant:.2f}",
            f"{self.v_important:.2f} and {self.v_unimportant:.2f}",
        )
        return f"{shares}, QK {qk}, V {v}"

    def scaled(self, factor: float) -> Tiers:
        """The policy with all ratios times a factor."""
        ratios = {name: getattr(self, name) * factor for name in RATIOS}
        return replace(self, **ratios)  # type: ignore[arg-type]

    def bytes_per_token(self, layouts: Sequence[LayerLayout], element_bytes: int) -> float:
        """Bytes of a token of a long sequence in a compressed model's cache, all layers, everything counted."""
        total, count = 0.0, len(layouts)
        leaders = self.shared_with or range(count)
        for index, (layout, share) in enumerate(zip(layouts, self.shares(count), strict=True)):
            high, low = (sum(cut.row_bytes(element_bytes)) for cut in self.layouts(layout))
            score = SCORE_BYTES if leaders[index] == index else 0
            total += 1 + share * (high + score) + (1 - share) * low
        return total

    def layouts(self, layout: LayerLayout) -> tuple[LayerLayout, LayerLayout]:
        """Layouts of the rows of important tokens, and of other tokens."""
        return (
            cut_layout(layout, self.qk_important, self.v_important),
            cut_layout(layout, self.qk_unimportant, self.v_unimportant),
        )


class TieredSequence(StoredSequence):
    """Store of a layer in tiers for one sequence.

    high: key and value rows of important tokens, in the order of their positions. low: of other tokens.
    important: [tokens] bool. scores: [important tokens] float32, by which they are chosen.
    """

    high: Rows
    low: Rows
    important: Tensor
    scores: Tensor


class TieredLayer(PolicyLayer):
    """One layer's cache in two blocks: rows of important tokens, and rows of others, with fewer channels. A number that
    was cut counts as 0, and a code as its middle."""

    in_pytorch = True
    new_sequence = TieredSequence
    sequences: list[TieredSequence]
    leader: TieredLayer | None = None
    """The layer whose important tokens this one takes; None: it chooses."""

    def __init__(self, policy: Tiers, share: float) -> None:
        super().__init__()
        self.policy, self.share = policy, share

    def follow(self, layout: LayerLayout, dtype: torch.dtype) -> None:
        self.layout, self.layouts = layout, self.policy.layouts(layout)

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        self.begin(call.mask, len(call.value), seq_len_of(call.query), call.query.device)
        self.follow(call.parameters.layout, call.query.dtype)
        call.cached()
        output, log_sums = self.attend(call.query, call.parameters, call.rotations.read, call.mask)
        self.choose(log_sums)
        return output.to(call.query.dtype)

    def attend(
        self, query: Tensor, parameters: AttentionParameters, rotation: Rotation | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention over all rows that are stored, and its log-sum-exp; see `kernels.reference.partial_attention`."""
        if self.layout.coded or rotation is not None:
            whole = [self._whole(sequence) for sequence in self.sequences]
            keys, values = (right_aligned(side, 0.0) for side in zip(*whole, strict=True))
            return partial_attention(query, keys, values, parameters, rotation, mask)
        high, low = (_CutAttention(parameters, layout) for layout in self.layouts)
        outputs, sums = [], []
        for row, sequence in enumerate(self.sequences):
            row_query = query[row : row + 1]
            of_sequence = None if mask is None else mask[row : row + 1] if len(mask) > 1 else mask
            parts = []
            for cut, rows, important in (high, sequence.high, True), (low, sequence.low, False):
                places = (sequence.important == important).nonzero()[:, 0]
                if len(places) or not sequence.tokens:  # of padding alone: zeros
                    seen = self._columns(of_sequence, places + sequence.start)
                    parts.append(cut(row_query, rows, seen))
            output, log_sum = zip(*parts, strict=True)
            joined = join(list(output), list(log_sum), high.widths) if len(parts) > 1 else parts[0]
            outputs.append(joined[0])
            sums.append(joined[1])
        return torch.cat(outputs), torch.cat(sums)

    def _columns(self, mask: Tensor | None, places: Tensor) -> Tensor | None:
        """The mask of the newest tokens over those at some positions; None: causal over exactly the newest."""
        if mask is not None:
            return mask[..., places] if mask.shape[-1] > 1 else mask
        if self.length == 1 or len(places) == self.length == self.num_tokens:
            return None
        queries = torch.arange(self.num_tokens - self.length, self.num_tokens, device=places.device)
        return (places <= queries[:, None])[None, None]

    def store(self, sequence: TieredSequence, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows of new tokens, which count as important until their worth is known; `attend` reads them.

        Returns:
            No rows.
        """
        new = torch.ones(sequence.new, dtype=torch.bool, device=keys.device)
        if not hasattr(sequence, "high"):
            empty = keys[:, :, :0].clone(), values[:, :, :0].clone()
            sequence.high, sequence.low = (_resized(empty, self.layout, layout) for layout in self.layouts)
            sequence.important, sequence.scores = new[:0], keys.new_zeros(0, dtype=torch.float32)
        sequence.high = _behind(sequence.high, _resized((keys, values), self.layout, self.layouts[0]))
        sequence.important = torch.cat([sequence.important, new])
        return keys[:, :, :0], values[:, :, :0]

    def _whole(self, sequence: TieredSequence) -> Rows:
        """All rows of a sequence in the order of their positions, filled up to all channels."""
        high, low = (
            _resized(rows, cut, self.layout)
            for rows, cut in zip((sequence.high, sequence.low), self.layouts, strict=True)
        )
        order = torch.cat([part.nonzero()[:, 0] for part in (sequence.important, ~sequence.important)]).argsort()
        return behind_padding(_chosen(_behind(high, low), order), sequence.start)

    def choose(self, log_sums: Tensor) -> None:
        """Choose the important tokens, now that the worth of the newest ones is known.

        In a sequence of n tokens the round(g n) with the largest scores stay important; channels that were cut do not
        come back. Among equals the older token stays.

        Args:
            log_sums: [batch_size, length, num_heads], the log-sum-exp of each query head's logits.
        """
        if self.leader is not None:
            for sequence, of in zip(self.sequences, self.leader.sequences, strict=True):
                kept = of.important.to(sequence.important.device)[sequence.important]
                if not bool(kept.all()):
                    self._cut_others(sequence, kept)
            return
        worth = torch.logsumexp(log_sums.float(), dim=-1)
        for sequence, of_tokens in zip(self.sequences, worth, strict=True):
            fresh = of_tokens[len(of_tokens) - sequence.new :].to(sequence.scores.device)
            sequence.scores = torch.cat([sequence.scores, fresh])
            order = sequence.scores.argsort(descending=True, stable=True)
            kept = torch.zeros_like(order, dtype=torch.bool)
            kept[order[: round(sequence.tokens * self.share)]] = True
            if not bool(kept.all()):
                self._cut_others(sequence, kept)

    def _cut_others(self, sequence: TieredSequence, kept: Tensor) -> None:
        """Move the important tokens that are not `kept`, [important tokens] bool, to the block of fewer channels."""
        others = sequence.important.nonzero()[~kept, 0]
        order = torch.cat([(~sequence.important).nonzero()[:, 0], others]).argsort()
        shorter = _resized(_chosen(sequence.high, ~kept), *self.layouts)
        sequence.low = _chosen(_behind(sequence.low, shorter), order)
        sequence.high = _chosen(sequence.high, kept)
        if self.leader is None:
            sequence.scores = sequence.scores[kept]
        sequence.important = sequence.important.index_fill(0, others, False)

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        self.update(key_states, value_states)
        self.choose(torch.zeros(len(key_states), key_states.shape[2], 1))


class _CutAttention:
    """Attention over rows of numbers that are cut to the first channels of each group, after RoPE or without it.

    Args:
        parameters: of the layer with all channels. cut: layout of the rows.

    widths: of each query head's output, with all channels.
    """

    def __init__(self, parameters: AttentionParameters, cut: LayerLayout) -> None:
        self.groups = parameters.layout.groups
        self.cut, self.heads = cut, parameters.heads_per_group
        self.widths = [group.values.width for group in self.groups for _ in range(self.heads)]
        basis = parameters.query_basis
        if basis is not None:
            basis = torch.cat(self._first(basis, [group.key.width for group in self.groups], 1), dim=-1)
        self.parameters = replace(parameters, layout=cut, query_basis=basis)

    def __call__(self, query: Tensor, rows: Rows, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend as `partial_attention` does; what was cut of the output is 0."""
        if query.dim() == 3:  # absorbed by q_proj: each group's heads with all channels
            query = torch.cat(self._first(query, [g.key.width for g in self.groups], self.heads), dim=-1)
        output, log_sums = partial_attention(query, *rows, self.parameters, None, mask)
        parts = output.split([self.heads * group.values.width for group in self.cut.groups], dim=-1)
        full = [
            functional.pad(part.unflatten(-1, (self.heads, -1)), (0, whole.values.width - group.values.width))
            for part, whole, group in zip(parts, self.groups, self.cut.groups, strict=True)
        ]
        return torch.cat([part.flatten(-2) for part in full], dim=-1), log_sums

    def _first(self, columns: Tensor, widths: list[int], times: int) -> list[Tensor]:
        """The columns of each group's key channels that are kept, each group having `times` its width of columns."""
        parts = columns.split([times * width for width in widths], dim=-1)
        return [
            part.unflatten(-1, (times, -1))[..., : group.key.width].flatten(-2)
            for part, group in zip(parts, self.cut.groups, strict=True)
        ]


def cut_layout(layout: LayerLayout, qk_ratio: float, v_ratio: float) -> LayerLayout:
    """Cut a share of each latent off its end: to the nearest number of channels, or units of 16 nibbles; one stays."""
    groups = (
        GroupLayout(g.kv_heads, cut_latent(g.key, qk_ratio), g.value and cut_latent(g.value, v_ratio))
        for g in layout.groups
    )
    return replace(layout, groups=tuple(groups))


def cut_latent(latent: Row, ratio: float) -> Row:
    """The first channels of a latent, as many as lie in whole units."""
    if isinstance(latent, NumberRow):
        return NumberRow(_kept(latent.rank, ratio, 1))
    nibbles = _kept(WORD_NIBBLES * latent.words, ratio, UNIT_NIBBLES) - latent.scaled
    left, counts = nibbles * NIBBLE_BITS, []
    for bits, count in zip(WIDTHS, latent.counts, strict=True):
        counts.append(min(count, left // bits))
        left = left - count * bits if counts[-1] == count else 0
    n16, n12, n8, n6, n4, n2 = counts
    return CodedRow(n16, n12, n8, n6, n4, n2, scaled=latent.scaled)


def _kept(whole: int, ratio: float, step: int) -> int:
    return max(step, int((1 - ratio) * whole / step + 0.5) * step)


def _resized(rows: Rows, layout: LayerLayout, to: LayerLayout) -> Rows:
    return resize_layer(rows[0], layout, to, keys=True), resize_layer(rows[1], layout, to, keys=False)


def _behind(first: Rows, second: Rows) -> Rows:
    return torch.cat([first[0], second[0]], dim=2), torch.cat([first[1], second[1]], dim=2)


def _chosen(rows: Rows, slots: Tensor) -> Rows:
    return rows[0][:, :, slots], rows[1][:, :, slots]
