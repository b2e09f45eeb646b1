"""What tiers cost: each layer and side cut by itself over a grid of (g, p), and what that predicts of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1
from typing import Literal

import numpy as np
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..evaluation.cached import PREFILL_SHARE, score_through_cache
from ..policies import Policy, Tiers, cache_policy
from ..progress import Advance
from ..rewriting.compressible import CompressibleModel
from ..runtime.attention import RotorAttention

SHARES = (0.0, 0.5)
"""g of the layer that is cut, in the grid."""

RATIOS = (0.3, 0.6, 0.85)
"""p of its unimportant tokens."""

LEVELS = tuple(round(0.1 * step, 1) for step in range(9))
"""Ratios, and shares of important tokens, among which a choice is made."""

SIDES: tuple[Literal["qk"], Literal["v"]] = ("qk", "v")

PROBE_STEP = 32
"""Tokens of a step in the grid: those of a step see each other's whole rows, which spares time and hardly changes which
ratios are better."""


class TierMeter:
    """Measures what tiers cost a compressed model, against the same model without them.

    Args:
        network: its layers compressed. rows: [n, seq_len] text, of which one PREFILL_SHARE is the prompt.
    """

    def __init__(self, network: CompressibleModel, rows: Tensor) -> None:
        self.network, self.rows = network, rows
        self._base: dict[int, float] = {}

    def cost(self, policy: Policy, step: int = 1) -> float:
        """Nats a token that a policy adds to the loss, read through the cache in steps of so many tokens."""
        if step not in self._base:
            self._base[step] = self._loss(None, step)
        return self._loss(policy, step) - self._base[step]

    def degradation(self, policy: Policy) -> float:
        """Q_d = (perplexity' - perplexity) / perplexity (ZDC section 5.2), in steps of one token."""
        return expm1(self.cost(policy))

    def _loss(self, policy: Policy | None, step: int) -> float:
        model, prefill = self.network.model, max(1, self.rows.shape[1] // PREFILL_SHARE)
        with cache_policy(model, policy):
            found = score_through_cache(
                model, self.rows, lambda: DynamicCache(config=self.network.config), prefill, step
            )
        return float(found.nll.mean())

    @property
    def row_bytes(self) -> list[tuple[int, int]]:
        """Of each layer's key and value rows, whole."""
        network = self.network
        modules = [network.family.attention_module(network.model, i) for i in range(network.shape.num_layers)]
        layouts = [module.layout for module in modules if isinstance(module, RotorAttention)]
        return [layout.row_bytes(2) for layout in layouts]


@dataclass(frozen=True)
class TierGrid:
    """Nats a token, of one layer and side cut alone.

    costs: [layers][sides][shares][ratios], of SHARES and RATIOS. row_bytes: of each layer's key and value rows.
    """

    costs: np.ndarray
    row_bytes: tuple[tuple[int, int], ...]

    @classmethod
    def measure(cls, meter: TierMeter, advance: Advance = lambda done: None) -> TierGrid:
        """`advance` is told each cell."""
        row_bytes = meter.row_bytes
        layers = len(row_bytes)
        costs = np.zeros((layers, len(SIDES), len(SHARES), len(RATIOS)))
        for layer, side, share, ratio in np.ndindex(costs.shape):
            costs[layer, side, share, ratio] = meter.cost(
                alone(layers, layer, SIDES[side], SHARES[share], RATIOS[ratio]), PROBE_STEP
            )
            advance(1)
        return cls(costs, tuple(row_bytes))

    @staticmethod
    def cells(layers: int) -> int:
        return layers * len(SIDES) * len(SHARES) * len(RATIOS)

    def cost(self, side: int, shares: np.ndarray, ratios: np.ndarray) -> np.ndarray:
        """Sum over layers of what ratios cost the unimportant tokens, by linear interpolation.

        Args:
            shares: [layers], g of each. ratios: any shape.
        Returns:
            [*ratios]; 0 where nothing is removed or everything is important.
        """
        at = np.array([0.0, *RATIOS])
        found = np.zeros(ratios.shape)
        for layer, share in enumerate(shares):
            by_share = np.concatenate([self.costs[layer, side], np.zeros((1, len(RATIOS)))])
            row = [np.interp(share, [*SHARES, 1.0], column) for column in by_share.T]
            found += np.interp(ratios, at, [0.0, *row])
        return found

    def predicted(self, policy: Tiers) -> float:
        """Nats a token of all layers and sides together: of p^i for all, and what p^u adds for the unimportant."""
        shares, none = np.array(self.shares_of(policy)), np.zeros(len(self.row_bytes))
        total = 0.0
        for side, (important, unimportant) in enumerate(ratios_of(policy)):
            both = np.array([important, unimportant])
            by_share = self.cost(side, shares, both)
            total += float(self.cost(side, none, both)[0] + by_share[1] - by_share[0])
        return total

    def shares_of(self, policy: Tiers) -> tuple[float, ...]:
        """g of each layer."""
        return policy.layer_important or (policy.important,) * len(self.row_bytes)

    def removed(self, policy: Tiers) -> float:
        """The share of the rows' bytes that is removed: equation 5, layers and sides by their bytes."""
        total = 0.0
        for share, sizes in zip(self.shares_of(policy), self.row_bytes, strict=True):
            for size, (important, unimportant) in zip(sizes, ratios_of(policy), strict=True):
                total += size * (important * share + unimportant * (1 - share))
        return total / sum(map(sum, self.row_bytes))

    def candidates(self) -> Candidates:
        """All choices of LEVELS for ratios, and of g from a first to a last layer's level.

        Unimportant tokens lose no less than important ones, and deeper layers have no fewer important tokens. Equal
        ones are allowed, so that one ratio for all tokens is among them.
        """
        levels = [(i, u) for i in LEVELS for u in LEVELS if i <= u]
        inner, outer = np.array([i for i, _ in levels]), np.array([u for _, u in levels])
        qk, v = (index.ravel() for index in np.indices((len(levels), len(levels))))
        sizes = np.array(self.row_bytes, dtype=np.float64)
        none, layers = np.zeros(len(sizes)), len(sizes)
        rows, costs, saved = [], [], []
        for first in LEVELS:
            for last in (level for level in LEVELS if level >= first):
                shares = np.linspace(first, last, layers)
                cost, gain = [], []
                for side in (0, 1):
                    all_of = self.cost(side, none, inner)
                    cost.append(all_of + self.cost(side, shares, outer) - self.cost(side, shares, inner))
                    part = float(sizes[:, side] @ shares), float(sizes[:, side] @ (1 - shares))
                    gain.append((inner * part[0] + outer * part[1]) / sizes.sum())
                costs.append(cost[0][qk] + cost[1][v])
                saved.append(gain[0][qk] + gain[1][v])
                ends = np.broadcast_to([first, last], (len(qk), 2))
                rows.append(np.column_stack([ends, inner[qk], outer[qk], inner[v], outer[v]]))
        return Candidates(np.concatenate(rows), np.concatenate(costs), np.concatenate(saved), layers)


@dataclass(frozen=True)
class Candidates:
    """Choices with what is predicted of them.

    rows: [n, 6]: g of the first and of the last layer, p_QK^i, p_QK^u, p_VW^i, p_VW^u. costs: nats a token. removed:
    shares of the rows' bytes.
    """

    rows: np.ndarray
    costs: np.ndarray
    removed: np.ndarray
    layers: int

    def tiered(self, alike: bool = False) -> Candidates:
        """Those that treat tokens differently: unimportant ones lose more, of keys and of values, and deeper layers
        have more important ones, or with `alike` as many."""
        rows = self.rows
        fits = (rows[:, 2] < rows[:, 3]) & (rows[:, 4] < rows[:, 5]) & (rows[:, 1] > 0)
        return self._only(fits & ((rows[:, 0] == rows[:, 1]) if alike else (rows[:, 0] < rows[:, 1])))

    def ordered(self) -> Candidates:
        """Those in which keys lose no less than values, as ZDC's text has it."""
        return self._only((self.rows[:, 2] >= self.rows[:, 4]) & (self.rows[:, 3] >= self.rows[:, 5]))

    def one_ratio(self) -> Candidates:
        """Those with one ratio for all tokens, of each side."""
        return self._only((self.rows[:, 2] == self.rows[:, 3]) & (self.rows[:, 4] == self.rows[:, 5]))

    def _only(self, fits: np.ndarray) -> Candidates:
        return Candidates(self.rows[fits], self.costs[fits], self.removed[fits], self.layers)

    def best(self, cost: float) -> Tiers | None:
        """What removes most at a predicted cost of at most so much; None where nothing costs so little."""
        fits = self.costs <= cost
        if not fits.any():
            return None
        order = np.lexsort((self.costs, -self.removed))
        return tiers_of(self.rows[order[fits[order]][0]], self.layers)


def alone(layers: int, layer: int, side: str, share: float, ratio: float) -> Tiers:
    """One side of one layer cut for its unimportant tokens."""
    shares = [1.0] * layers
    shares[layer] = share
    other = {"qk": "v", "v": "qk"}[side]
    return Tiers(layer_important=tuple(shares), **{f"{side}_unimportant": ratio, f"{other}_unimportant": 0.0})  # type: ignore[arg-type]


def tiers_of(row: Sequence[float] | np.ndarray, layers: int) -> Tiers:
    """The policy of a row of Candidates."""
    first, last, qk_important, qk_unimportant, v_important, v_unimportant = (round(float(x), 6) for x in row)
    shares = tuple(round(float(share), 6) for share in np.linspace(first, last, layers))
    return Tiers(
        layer_important=shares,
        qk_important=qk_important,
        qk_unimportant=qk_unimportant,
        v_important=v_important,
        v_unimportant=v_unimportant,
    )


def row_of(policy: Tiers) -> list[float]:
    """The row of Candidates of a policy whose shares rise evenly."""
    (qk_i, qk_u), (v_i, v_u) = ratios_of(policy)
    shares = policy.layer_important
    return [shares[0], shares[-1], qk_i, qk_u, v_i, v_u]


def ratios_of(policy: Tiers) -> tuple[tuple[float, float], tuple[float, float]]:
    """(p^i, p^u) of keys and of values."""
    return (policy.qk_important, policy.qk_unimportant), (policy.v_important, policy.v_unimportant)


def degradation(nats: float) -> float:
    """Q_d of a loss that is so much larger."""
    return exp(nats) - 1
