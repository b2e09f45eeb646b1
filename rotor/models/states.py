"""Bytes of what a sequence keeps beside keys and values: states of Mamba, linear attention and convolutions."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STATES = ("conv_states", "recurrent_states")
"""Attributes of a layer of transformers' caches that hold its states by number."""


def state_bytes(config: PreTrainedConfig) -> int:
    """Bytes of the states of one sequence, however long it is; 0 of a model that has attention alone.

    One token goes through the model on the meta device, and the states that the cache then has are counted.
    """
    cache: Any = DynamicCache(config=config)
    if not any(hasattr(layer, name) for layer in cache.layers for name in STATES):
        return 0
    from .loading import config_model  # imports the models of transformers

    model = config_model(copy.deepcopy(config)).eval()  # building and the next line change settings of the config
    model.set_experts_implementation("batched_mm")  # others look at values, which the meta device has not
    with torch.no_grad(), torch.device("meta"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    states = (state for layer in cache.layers for name in STATES for state in getattr(layer, name, {}).values())
    return sum(state.nbytes for state in states if isinstance(state, Tensor))
