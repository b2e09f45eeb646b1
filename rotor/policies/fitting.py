"""Fit cache policies that need it, by running their model over calibration text.

Keys and values are recorded where they enter the cache, so that the rows of compressed models are recorded too.
Calibration records them inside attention instead (`calibration/capture.py`): it also needs queries, outputs and keys
before RoPE, of uncompressed models alone, one layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from ..errors import DataError, NumericsError
from ..numerics import is_finite
from . import LayerSample, Policy, PolicyLayer, cache_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIT_TOKENS = 4096
"""Tokens that a policy is fitted to, at most; KVQuant takes 16 sequences of 2048."""


def fit_cache_policy(model: PreTrainedModel, policy: Policy, sequences: Tensor) -> Policy:
    """Fit a policy to calibration text; a policy that needs nothing comes back as it is.

    Args:
        model: a causal model of transformers, compressed or not, with all weights in memory.
        sequences: [n, seq_len] int64, sequences without padding; the first FIT_TOKENS tokens are read.
    Raises:
        DataError: there is no sequence of two tokens or more.
        NumericsError: keys, values or gradients that are not finite; names the layer.
        UsageError: the policy cannot serve the model.
    """
    if not policy.needs_samples:
        return policy
    if sequences.dim() != 2 or sequences.shape[0] == 0 or sequences.shape[1] < 2:
        raise DataError(
            f"cache policy {policy.method}: shape {list(sequences.shape)}, expected sequences of two tokens or more.",
            "Give text of the model's own tokens, [sequences, seq_len].",
        )
    count = max(1, FIT_TOKENS // sequences.shape[1])
    samples = layer_samples(model, sequences[:count], policy.moves_keys, gradients=policy.needs_gradients)
    return policy.fitted(samples)


def layer_samples(
    model: PreTrainedModel, sequences: Tensor, pre_rope: bool = False, *, gradients: bool = True
) -> list[LayerSample]:
    """Record the keys and values that enter each layer's cache.

    Args:
        sequences: [n, seq_len].
        pre_rope: record keys of an uncompressed model before RoPE.
        gradients: record the gradients of the summed loss by them, too, for which a pass keeps the activations of all
            layers.
    Raises:
        NumericsError: something is not finite; names the layer.
    """
    record = _samples_with_gradients if gradients else _sequence_samples
    with cache_policy(model, _Recording(pre_rope)):
        by_sequence = [record(model, sequence.to(model.device)) for sequence in sequences.split(1)]
    samples = []
    for index, parts in enumerate(zip(*by_sequence, strict=True)):
        sides = [torch.cat(side) for side in zip(*parts, strict=True)]
        names = ("keys", "values", "key gradients", "value gradients")
        for name, side in zip(names, sides, strict=False):
            if not is_finite(side):
                raise NumericsError(
                    f"layer {index}: {name} on the calibration text are not finite.",
                    "Fit the policy with the model in float32.",
                )
        samples.append(LayerSample(*sides))
    return samples


def _sequence_samples(model: PreTrainedModel, sequence: Tensor) -> list[list[Tensor]]:
    """Record keys and values for one sequence, layer by layer."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.base_model(input_ids=sequence, past_key_values=cache, use_cache=True)  # without logits
    layers: list[Any] = list(cache.layers)
    return _of_heads([[layer.keys, layer.values] for layer in layers])


def _samples_with_gradients(model: PreTrainedModel, sequence: Tensor) -> list[list[Tensor]]:
    """Record keys, values and their gradients for one sequence, layer by layer."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(False), torch.enable_grad():
        logits = model(input_ids=sequence.clone(), past_key_values=cache, use_cache=True).logits[0, :-1]
        loss = functional.cross_entropy(logits.float(), sequence[0, 1:].clone(), reduction="sum")
        layers: list[Any] = list(cache.layers)
        gradients = torch.autograd.grad(loss, [part for layer in layers for part in layer.added])
    return _of_heads([[layer.keys, layer.values, *gradients[2 * i : 2 * i + 2]] for i, layer in enumerate(layers)])


def _of_heads(sides: list[list[Any]]) -> list[list[Tensor]]:
    """Sides of a sequence over all heads, [1, seq_len, width], on the CPU."""
    return [[side.detach().float().cpu().transpose(1, 2).flatten(2) for side in layer] for layer in sides]


@dataclass(frozen=True)
class _Recording(Policy):
    """Policy that keeps all tokens, and the tensors for taking gradients by keys and values."""

    method: ClassVar[str] = "recording"
    pre_rope: bool

    @property
    def moves_keys(self) -> bool:
        return self.pre_rope

    def layers(self, count: int) -> list[PolicyLayer]:
        return [_RecordingLayer() for _ in range(count)]


class _RecordingLayer(PolicyLayer):
    """Layer of a recording cache.

    added: zeros that are added to keys and to values, so that their gradients are those of keys and values.
    """

    added: tuple[Tensor, Tensor]

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        """Nothing is padding."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        key, value = (torch.zeros_like(states).requires_grad_() for states in (key_states, value_states))
        self.added, self.num_tokens = (key, value), key_states.shape[2]
        index = torch.arange(self.num_tokens, device=key_states.device).expand(1, 1, -1)
        self.keys, self.values = self.rotated(key_states, -index) + key, value_states + value
        return self.rotated(self.keys, index), self.values

    def stored_bytes(self) -> int:
        return 0
