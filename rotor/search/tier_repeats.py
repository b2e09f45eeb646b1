"""How much layers repeat each other's choice of important tokens, and which of them may go by another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..policies import H2O, EvictingLayer, Policy, TieredLayer, Tiers, cache_policy
from ..rewriting.compressible import CompressibleModel


@torch.inference_mode()
def importances(network: CompressibleModel, rows: Tensor, policy: Policy) -> Tensor:
    """What each layer's tokens are worth to a policy, of a model whose layers are compressed.

    Args:
        rows: [n, seq_len] tokens, without padding; seen in one step.
        policy: `Tiers` in which all tokens are important, or an eviction by scores of whole layers that drops none.
    Returns:
        [layers, n, seq_len] float32.
    """
    found = []
    with cache_policy(network.model, policy):
        for part in network.batches(rows):
            cache = DynamicCache(config=network.config)
            network.decoder(input_ids=rows[part].to(network.device), past_key_values=cache, use_cache=True)
            found.append(torch.stack([_scores(layer) for layer in cache.layers]).cpu())
    return torch.cat(found, dim=1)


def _scores(layer: Any) -> Tensor:
    if isinstance(layer, TieredLayer):
        assert layer.index.scores is not None
        return layer.index.scores
    assert isinstance(layer, EvictingLayer)
    return layer.policy.priority(layer)[:, 0]


def by_denominator() -> Tiers:
    """What `importances` needs for softmax denominators."""
    return Tiers(important=1.0)


def by_average_score() -> H2O:
    """What `importances` needs for the mean attention that a token draws of those that see it."""
    return H2O(share=1.0, scope="layer", average=True)


def repetition(found: Tensor, share: float, most: bool) -> np.ndarray:
    """The share of a layer's tokens that another's set has too, the mean over rows, [layers, layers].

    Args:
        found: [layers, n, seq_len], as importances gives them. share: of the tokens that a set has.
        most: the most important ones; False: the least.
    Source: ZDC section 3.3, figures 7 and 8.
    """
    count = max(1, round(share * found.shape[2]))
    best = found.topk(count, dim=-1, largest=most).indices
    member = torch.zeros(found.shape, dtype=torch.float64).scatter(-1, best, 1.0)
    both: np.ndarray = torch.einsum("lnt,mnt->lm", member, member).div(count * found.shape[1]).numpy()
    return both


def leaders_of(found: Tensor, shares: Sequence[float], threshold: float) -> tuple[int, ...]:
    """For each layer the one whose choice it repeats, itself where it repeats none.

    A layer goes by the last leader before it where more than `threshold` of both their important and their unimportant
    tokens are the same, and so nearly as many.

    Args:
        shares: g of each layer; a layer that repeats takes its leader's.
    Source: ZDC section 5.2 ("repetition ratio > 95%").
    """
    leaders: list[int] = []
    for layer in range(len(found)):
        leader = leaders[-1] if leaders else layer
        alike = layer == leader or (
            all(min(sizes) >= threshold * max(sizes) for sizes in _sizes(shares[leader], shares[layer]))
            and repeated(found[[leader, layer]], shares[leader]) > threshold
        )
        leaders.append(leader if alike else layer)
    return tuple(leaders)


def _sizes(first: float, second: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of the sets of important, and of unimportant tokens, of two layers."""
    return (first, second), (1 - first, 1 - second)


def repeated(pair: Tensor, share: float) -> float:
    """The smaller repetition of two layers' important and unimportant tokens, of [2, n, seq_len]."""
    sets = [(share, True), (1 - share, False)]
    return min((float(repetition(pair, part, most)[0, 1]) for part, most in sets if 0 < part < 1), default=1.0)
