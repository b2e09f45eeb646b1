"""Policies that drop tokens: what the methods share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import UsageError
from .budgets import SqueezeBudgets, squeeze_shares
from .column_sums import Softening
from .evicting_layer import EvictingLayer
from .layer import PolicyLayer
from .policy import LayerSample, Policy


@dataclass(frozen=True)
class Eviction(Policy):
    """Keeps a budget of b tokens in each layer; what is over it is dropped after every step. Tokens stay at the places
    that they had.

    Args:
        share: of the prompt's tokens that are the budget. tokens: the budget in tokens, in place of a share.
        scope: `group`: each KV head (of a compressed model each group of heads) keeps tokens of its own; `layer`: all
            of a layer the same.
        squeeze: p of SqueezeAttention, by which budgets differ between layers; see rotor.policies.budgets.
        squeeze_on: what its cosines are measured on: each `prompt`, or text once before, at `calibration`, which gives
            layer_shares.
        bits, group: codes of the rows that are kept, as the policy `per-token` has them: 16 (none), 8, 4, 3 or 2, in
            groups of so many columns. A token is exact in its own step; a prompt is cut, then coded.
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
    squeeze_on: Literal["prompt", "calibration"] = "prompt"
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
        return self.squeeze is not None and not self.needs_samples

    @property
    def needs_samples(self) -> bool:
        return self.squeeze is not None and self.squeeze_on == "calibration"

    def fitted(self, samples: Sequence[LayerSample]) -> Eviction:
        if self.squeeze is None or not self.needs_samples:
            return self
        shares = squeeze_shares([sample.cosine for sample in samples], self.squeeze)
        return replace(self, squeeze=None, squeeze_on="prompt", layer_shares=tuple(round(s, 6) for s in shares))

    def layers(self, count: int) -> list[PolicyLayer]:
        fits = len(self.layer_shares) in (0, count)
        self.require(fits, "layer_shares", f"one for each of the model's {count} layers")
        if self.needs_samples:
            raise UsageError(
                f"cache policy {self.method}: squeeze_on calibration: budgets of layers have not been found.",
                "`rotor export RUN -o OUT --accuracy 0.99 --cache NAME` finds and stores them, "
                "rotor.fit_cache_policy(model, policy, rows) gives a policy that has them; squeeze_on prompt measures "
                "each prompt.",
            )
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

    def check_coded(self) -> None:
        """Rows of codes are kept or dropped whole; they are not coded again."""
        if self.bits < 16:
            raise UsageError(
                f"cache policy {self.method}: bits {self.bits}: this checkpoint's rows are codes already.",
                "Leave bits at 16, or use a recipe whose columns have 16 bits (rotor-16).",
            )

    @abstractmethod
    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the first and of the newest tokens stay, whatever their scores, of budgets [batch_size]."""

    def priority(self, layer: EvictingLayer) -> Tensor:
        """What is kept first, [batch_size, 1 or groups, slots]; of equals the older."""
        assert layer.scores is not None
        return layer.scores


@dataclass(frozen=True)
class ScoringEviction(Eviction):
    """Keeps the tokens of the highest scores, which attention weights add to in every step, and the newest.

    Args:
        recent: share of the budget that the newest tokens have; the heavy hitters have the rest.
    """

    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.recent <= 1, "recent", "a share from 0 to 1")

    @property
    def needs_weights(self) -> bool:
        return True

    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(budget), (budget * self.recent).round().long()

    def softening(self, layer: EvictingLayer) -> Softening:
        """What is done to a step's logits before the softmax whose columns are added to the scores: nothing."""
        return Softening()
