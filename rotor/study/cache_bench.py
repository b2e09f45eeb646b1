"""Measuring a model whose cache follows a policy, beside the same model without one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..policies import LONG_TOKENS, EvictingLayer, Policy, PolicyLayer, cache_policy, stored_bytes
from ..policies.sizes import random_rows
from ..rewriting.compressible import CompressibleModel
from ..runtime.attention import RotorAttention


class PolicyModel:
    """A network's model, compressed as it is or uncompressed, whose cache follows a policy.

    Called like a model. The policy is in force for the length of the call: the reference beside it has none.
    """

    def __init__(self, network: CompressibleModel, policy: Policy | None, compressed: bool) -> None:
        self.network, self.policy, self.compressed = network, policy, compressed
        self.config, self.device = network.config, network.device

    def __call__(self, **arguments: Any) -> Any:
        with ExitStack() as held:
            model = self.network.model if self.compressed else held.enter_context(self.network.uncompressed())
            held.enter_context(cache_policy(model, self.policy))
            return model(**arguments)

    @torch.no_grad()
    def layer_bytes(self, prompt: int, tokens: int) -> list[int]:
        """Bytes of all layers after a prompt of random keys and values, and after each token that follows it.

        Budgets that depend on the prompt (`squeeze`) are taken as equal, which they are in the mean.
        """
        assert self.policy is not None
        plain = DynamicCache(config=self.config)
        none = PolicyModel(self.network, None, self.compressed)
        none(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=self.device), past_key_values=plain)
        total = [0] * (tokens - prompt + 1)
        layers = self.policy.layers(len(plain.layers))
        evicting, known = self.policy.evicts, {}
        likes: list[Any] = list(plain.layers)
        if self.policy.rows_only:
            return self._bytes_of_rows(layers, likes, prompt, tokens)
        for index, (layer, like) in enumerate(zip(layers, likes, strict=True)):
            shapes = like.keys.shape, like.values.shape
            if evicting or shapes not in known:
                states = [random_rows(s[1], tokens, s[3], like.keys.dtype) for s in shapes]
                if isinstance(layer, EvictingLayer):
                    self._follow(layer, index)
                    layer.fill(states[0][:, :, :prompt], states[1][:, :, :prompt])
                    known[shapes] = [layer.stored_bytes()] * len(total)  # as many stay with each token that comes
                else:
                    found, cache = [], Cache(layers=[layer])
                    for start, end in zip([0, *range(prompt, tokens)], range(prompt, tokens + 1), strict=True):
                        cache.update(states[0][:, :, start:end], states[1][:, :, start:end], 0)
                        found.append(stored_bytes(cache))
                    known[shapes] = found
            total = [sum(pair) for pair in zip(total, known[shapes], strict=True)]
        return total

    def mean_kv_bytes_per_token(self, prompt: int, tokens: int) -> float:
        """The mean over lengths from prompt + 1 to `tokens`."""
        sizes = self.layer_bytes(prompt, tokens)[1:]
        return sum(size / (prompt + 1 + step) for step, size in enumerate(sizes)) / len(sizes)

    def long_kv_bytes_per_token(self) -> float:
        """Of a prompt of LONG_TOKENS."""
        return self.layer_bytes(LONG_TOKENS, LONG_TOKENS)[-1] / LONG_TOKENS

    def _bytes_of_rows(self, layers: list[PolicyLayer], likes: list[Any], prompt: int, tokens: int) -> list[int]:
        """`layer_bytes` where layers go by each other: all of them after each step."""
        states = [[random_rows(s.shape[1], tokens, s.shape[3], s.dtype) for s in (x.keys, x.values)] for x in likes]
        found = []
        for index, layer in enumerate(layers):
            self._follow(layer, index)
        for start, end in zip([0, *range(prompt, tokens)], range(prompt, tokens + 1), strict=True):
            for layer, (key, value) in zip(layers, states, strict=True):
                layer.fill(key[:, :, start:end], value[:, :, start:end])
            found.append(sum(layer.stored_bytes() for layer in layers))
        return found

    def _follow(self, layer: PolicyLayer, index: int) -> None:
        module = self.network.family.attention_module(self.network.model, index)
        if self.compressed and isinstance(module, RotorAttention):
            layer.follow(module.layout, module.shape.heads_per_kv, self.network.dtype)
