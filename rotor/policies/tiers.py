"""Tiers: important tokens keep more channels of their rows than others (ZDC's ratios per token)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..format.layout import LayerLayout
from .layer import PolicyLayer
from .policy import Policy
from .tier_index import TierIndex
from .tier_rows import cut_layout
from .tiered_layer import TieredLayer


@dataclass(frozen=True)
class Tiers(Policy):
    """In each layer a share g of the tokens is important. Of an important token's rows p^i is removed, of another's
    p^u: the last columns of each group, keys and values by ratios of their own. Rows of codes likewise, whose last
    columns are those of fewest bits; or some of the bits of each column, by shifting its code.

    A token is worth its softmax denominator, summed over query heads: sum_h sum_k exp(s_k^h), s its logits as a query
    over the keys it sees; of n tokens the g n with the largest are important. The denominator is known after the
    layer's attention, which gives its logarithm anyway.

    Args:
        important: g. layer_important: g of each layer, in its place.
        qk_important, qk_unimportant: p_QK^i and p_QK^u, shares of a key latent's bytes that are removed.
        v_important, v_unimportant: p_VW^i and p_VW^u, of a value latent's; joint latents are keys'.
        leaders: for each layer the one whose choice it repeats, itself where it chooses; () where all choose. A layer
            that repeats a choice knows it before its own attention, and cuts rows before it.
        importance: `denominator`, as above; `mean`: divided by the number of keys that the token sees, so that later
            tokens have no lead; `random`: a number drawn for each token, the control.
        seed: of the drawn numbers.

    A token's importance is settled against those before it: when g n tokens are more than there are room for, the least
    of the important ones loses channels for good. So generated tokens are ranked as the prompt's are.
    Bytes: those of both kinds of rows, and for each layer that chooses a byte a token, and a float32 an important one.
    Limits: for compressed checkpoints, whose channels are nested; one that was refitted for its rank, or centred, is
    cut no better than another. Queries keep all channels: the paper cuts those of unimportant tokens too, which saves
    arithmetic and no cache. Post-RoPE codes give denominators without what the channels' means add to every logit of a
    query. Attention runs in plain PyTorch.
    Source: ZDC section 5.2. Its equation 6 asks for p^u < p^i and p_QK <= p_VW, its text for the opposite ("unimportant
    tokens have a higher p; the QK pair has more dimensions to drop"): the text, of which p^u >= p^i is required here.
    """

    method: ClassVar[str] = "tiers"
    rows_only: ClassVar[bool] = True
    important: float = 0.5
    layer_important: tuple[float, ...] = ()
    qk_important: float = 0.0
    qk_unimportant: float = 0.5
    v_important: float = 0.0
    v_unimportant: float = 0.25
    leaders: tuple[int, ...] = ()
    importance: Literal["denominator", "mean", "random"] = "denominator"
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
        fits = all(0 <= leader <= layer for layer, leader in enumerate(self.leaders))
        fits = fits and all(self.leaders[leader] == leader for leader in self.leaders)
        self.require(fits, "leaders", "for each layer itself, or an earlier one that has itself")
        self.require(self.importance in ("denominator", "mean", "random"), "importance", "denominator, mean or random")
        self.require(0 <= self.seed < 2**63, "seed", "a number from 0")

    @property
    def longest_step(self) -> int | None:
        return 1

    def layers(self, count: int) -> list[PolicyLayer]:
        for name in ("layer_important", "leaders"):
            fits = len(getattr(self, name)) in (0, count)
            self.require(fits, name, f"one for each of the model's {count} layers")
        leaders = self.leaders or tuple(range(count))
        indices = {leader: TierIndex(self, leader, sharing) for leader, sharing in Counter(leaders).items()}
        return [TieredLayer(self, indices[leader], layer == leader) for layer, leader in enumerate(leaders)]

    def important_of(self, layer: int) -> float:
        """g of a layer that chooses."""
        return self.layer_important[layer] if self.layer_important else self.important

    def layouts(self, layout: LayerLayout) -> tuple[LayerLayout, LayerLayout]:
        """Of the rows of important tokens, and of the others'."""
        return (
            cut_layout(layout, self.qk_important, self.v_important),
            cut_layout(layout, self.qk_unimportant, self.v_unimportant),
        )

    def check_coded(self) -> None:
        """Rows of codes are cut between nibbles."""
