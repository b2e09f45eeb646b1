"""A model without its weights: sizes from its configuration and the headers of its shards."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.families import Family, attention_shape, find_family
from ..checkpoint.layout import AttentionShape
from .memory import LIBRARIES_BYTES, Estimate, Estimates
from .source import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STATES = ("conv_states", "recurrent_states")
"""Attributes of a layer of transformers' caches that hold its states by number."""


@dataclass(frozen=True)
class ModelOutline:
    """A model without its weights: everything that config and headers tell.

    config: the transformers config of the whole model; text_config: that of its language model.
    layers: elements of the decoder layers that run at the turn of each, see `Family.turns`.
    vocabulary: elements of each matrix over the vocabulary (the embedding, and the head unless tied); what else layers
        read of tokens is in `rest`.
    rest: elements of everything else.
    stored_bytes: bytes of all shards.
    dtype: that the model is served in.
    """

    config: PreTrainedConfig
    family: Family
    shape: AttentionShape
    layers: tuple[int, ...]
    vocabulary: tuple[int, ...]
    rest: int
    stored_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelOutline:
        """Outline a checkpoint; raises UnsupportedModelError if rotor cannot compress it."""
        shapes = {name: checkpoint.shape_of(name) for name in checkpoint.names}
        return cls.of_headers(checkpoint.config, shapes, checkpoint.total_bytes(), checkpoint.dtype)

    @classmethod
    def of_headers(
        cls, config: PreTrainedConfig, shapes: dict[str, list[int]], stored_bytes: int, dtype: torch.dtype
    ) -> ModelOutline:
        """Outline a model from the shapes of its tensors by name and the bytes of their files; raises like `of`."""
        family, shape, text = find_family(config), attention_shape(config), config.get_text_config()
        turns = family.turns(text.num_hidden_layers)
        layers = [0] * shape.num_layers
        vocabulary: list[int] = []
        rest = 0
        prefix = f"{family.decoder}.{family.layers}."
        for stored_name, dims in shapes.items():
            name = family.module_name(stored_name)
            index = name[len(prefix) :].partition(".")[0] if name.startswith(prefix) else ""
            if index.isdigit() and int(index) < text.num_hidden_layers:
                layers[next(layer for layer, turn in enumerate(turns) if int(index) in turn)] += math.prod(dims)
            elif len(dims) == 2 and text.vocab_size in dims and (text.hidden_size in dims or not family.reads_tokens):
                vocabulary.append(math.prod(dims))
            else:
                rest += math.prod(dims)
        return cls(config, family, shape, tuple(layers), tuple(vocabulary), rest, stored_bytes, dtype)

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.config.get_text_config()

    @property
    def parameters(self) -> int:
        return sum(self.layers) + sum(self.vocabulary) + self.rest

    def pass_flops(self, text: int, prompts: int = 0) -> float:
        """FLOPs of the large products of a forward pass: of layers for all tokens, of the head for those of text.

        All experts of a mixture are counted as active.
        """
        return 2.0 * (sum(self.layers) * (text + prompts) + max(self.vocabulary, default=0) * text)

    def estimates(
        self,
        device: torch.device,
        dtype: torch.dtype,
        host: dict[str, int],
        work: dict[str, int],
        disk: tuple[int, int],
        copied: int = 0,
    ) -> Estimates:
        """Make both estimates of a command: `work` and the weights take memory on the device, `host` on the machine.

        Tensors that safetensors maps from a file are not counted, because the system drops their pages when memory is
        short.

        Args:
            disk: bytes while the command runs, and bytes that stay.
            copied: elements of weights that exist twice when all weights are in memory.
        """
        host = {"libraries": LIBRARIES_BYTES, **host}

        def estimate(elements: int) -> Estimate:
            placed = {"weights": elements * dtype.itemsize, **work}
            if device.type == "cuda":
                return Estimate(host, placed, *disk)
            return Estimate({**host, **placed}, {}, *disk)

        part = max(*self.layers, *self.vocabulary, 0)
        if self.family.reads_tokens:  # beside the embedding
            part = max(self.layers) + max(self.vocabulary, default=0)
        return Estimates(estimate(self.parameters + copied), estimate(part + self.rest))


def state_bytes(config: PreTrainedConfig) -> int:
    """Bytes of the states of one sequence, however long it is; 0 of a model that has attention alone.

    One token goes through the model on the meta device, and the states that the cache then has are counted.
    """
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=config)
    if not any(hasattr(layer, name) for layer in cache.layers for name in STATES):
        return 0
    from .loading import config_model  # imports the models of transformers

    model = config_model(deepcopy(config)).eval()  # building and the next line change settings of the config
    model.set_experts_implementation("batched_mm")  # others look at values, which the meta device has not
    with torch.no_grad(), torch.device("meta"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    states = (state for layer in cache.layers for name in STATES for state in getattr(layer, name, {}).values())
    return sum(state.nbytes for state in states if isinstance(state, Tensor))
