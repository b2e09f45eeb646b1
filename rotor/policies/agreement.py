"""Agreement of the layers of a model in which tokens are important (ZDC section 5.2, observation O4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from .adoption import cache_policy
from .methods.tiers import RATIOS, Tiers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AGREEMENT_SEQUENCES = 4
"""Sequences over which agreement is counted, at most."""


@torch.no_grad()
def agreement(model: PreTrainedModel, policy: Tiers, sequences: Tensor) -> Tensor:
    """Share of important tokens that two layers have in common, where no channel is removed.

    Args:
        model: compressed. sequences: [n, seq_len], of which the first AGREEMENT_SEQUENCES are read.
    Returns:
        [layers, layers] float64, common tokens over the more of both, in the mean over sequences.
    """
    whole = replace(policy, shared_with=(), **dict.fromkeys(RATIOS, 0.0))  # type: ignore[arg-type]
    agreements = []
    with cache_policy(model, whole):
        for sequence in sequences[:AGREEMENT_SEQUENCES].split(1):
            cache = DynamicCache(config=model.config)
            model(input_ids=sequence.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            layers: list[Any] = list(cache.layers)
            chosen = torch.stack([layer.sequences[0].important for layer in layers]).double().cpu()
            agreements.append(in_common(chosen))
    return torch.stack(agreements).mean(0)


def in_common(chosen: Tensor) -> Tensor:
    """Share of its tokens that each layer's choice has in common with each other's: over the more of both.

    Args:
        chosen: [layers, tokens], 1.0 or 0.0, float64.
    """
    counts = chosen.sum(-1)
    return chosen @ chosen.mT / torch.maximum(counts[:, None], counts).clamp(min=1)


def shared_choices(agreeing: Tensor, above: float) -> tuple[int, ...]:
    """Give each layer the layer whose choice it takes: the last one that chose, where both agree by more than `above`,
    else itself."""
    leaders = [0]
    for layer in range(1, len(agreeing)):
        leaders.append(leaders[-1] if float(agreeing[leaders[-1], layer]) > above else layer)
    return tuple(leaders)


def agreement_in_words(agreeing: Tensor, above: float) -> str:
    """Describe how far neighbouring layers agree."""
    pairs = agreeing.diagonal(1)
    over = int((pairs > above).sum())
    return (
        f"neighbouring layers have {float(pairs.mean()):.2f} of their important tokens in common, "
        f"{over} of {len(pairs)} pairs more than {above:g}"
    )
