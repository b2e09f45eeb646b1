"""Random states of heads, the affine code of them in float64, and caches of a policy."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rotor.models.layerwise import LayerwiseModel
from rotor.policies import Policy
from rotor.search.evaluation import cached
from rotor.search.evaluation.scoring import Scores, score


def cache_of(policy: Policy, config: Any) -> Cache:
    """A cache that follows a policy, for a model that was not given it: rows have no padding."""
    return Cache(layers=[*policy.layers(config.num_hidden_layers)])


def scores_behind(model: Any, rows: Tensor, prefill: int, policy: Policy | None = None, step: int = 1) -> Scores:
    """Of what follows the prefill, read through a cache of a policy, against the model without one."""
    network = LayerwiseModel.of(model)
    with patch.object(cached, "DynamicCache", partial(cache_of, policy)) if policy else nullcontext():
        states = cached.final_states_through_cache(network, rows, prefill, step=step)[:, prefill:]
    reference = network.final_states(rows)[:, prefill:]
    return score(network, rows[:, prefill:], reference=reference, states=states)


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(shape[-1], generator=generator) * 3 + 0.2
    return (torch.randn(shape, generator=generator) * scales + scales.flip(0)).to(dtype)


def affine_truth(numbers: np.ndarray, bits: int, tokens: int, columns: int) -> np.ndarray:
    """Decoded numbers of one head, [tokens, width], group by group in float64; metadata rounded to float16."""
    result = np.empty_like(numbers)
    for t in range(0, numbers.shape[0], tokens):
        for c in range(0, numbers.shape[1], columns):
            group = numbers[t : t + tokens, c : c + columns]
            zero = float(np.float16(group.min()))
            scale = float(np.float16((group.max() - zero) / (2**bits - 1)))
            codes = np.clip(np.round((group - zero) / scale), 0, 2**bits - 1)
            result[t : t + tokens, c : c + columns] = zero + scale * codes
    return result
