"""Policies that code keys and values: what the methods share, and the cache layer around two sides of coded tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .layer import PolicyLayer, StoredSequence, behind_padding
from .policy import LayerSample, Policy
from .store import Side, Stream


class Quantiser(Policy):
    """A policy that codes every token."""

    @abstractmethod
    def streams(self) -> tuple[Stream, Stream]:
        """How keys and values are coded."""

    def beyond_windows(self) -> Quantiser:
        """The policy for models with sliding windows too, to measure what its codes cost there.

        Attention is as ever, but the cache keeps tokens that have left the window, and knows no padding: nothing to
        serve from.
        """
        found = copy(self)
        object.__setattr__(found, "holds_windows", True)
        return found

    def check_rows(self, coded: bool, post_rope: bool) -> None:
        if coded:
            raise UsageError(
                f"cache policy {self.method}: it quantises, and this checkpoint's rows are codes already.",
                "Use --cache none or a policy that only evicts, or a recipe whose columns have 16 bits (rotor-16).",
            )

    @property
    def longest_step(self) -> int | None:
        return min((step for step in (stream.longest_step for stream in self.streams()) if step), default=None)

    def layers(self, count: int) -> list[PolicyLayer]:
        return [CodedLayer(self.streams()) for _ in range(count)]


class FittedQuantiser(Quantiser):
    """One whose levels are found on calibration text, for each layer. Keys are coded before RoPE.

    levels: what was found for each layer; empty before.
    """

    levels: tuple[Any, ...] = ()

    @abstractmethod
    def fit_layer(self, sample: LayerSample) -> Any:
        """What is found for a layer."""

    def fitted(self, samples: Sequence[LayerSample]) -> FittedQuantiser:
        fitted = copy(self)
        object.__setattr__(fitted, "levels", tuple(self.fit_layer(sample) for sample in samples))
        return fitted

    @abstractmethod
    def streams_of(self, found: Any) -> tuple[Stream, Stream]:
        """How keys and values of a layer are coded."""

    def streams(self) -> tuple[Stream, Stream]:
        """Of the first layer: which tokens wait is the same in all."""
        return self.streams_of(self.levels[0])

    @property
    def needs_samples(self) -> bool:
        return not self.levels

    @property
    def moves_keys(self) -> bool:
        return True

    def layers(self, count: int) -> list[PolicyLayer]:
        if len(self.levels) != count:
            raise UsageError(
                f"cache policy {self.method}: was fitted to {len(self.levels)} layers, the model has {count}.",
                "`rotor validate MODEL --cache NAME` and `rotor study` fit it to text, and so does export where a "
                "checkpoint can store it; rotor.fit_cache_policy(model, policy, rows) gives a fitted policy.",
            )
        return [CodedLayer(self.streams_of(found)) for found in self.levels]


class CodedSequence(StoredSequence):
    """sides: of keys and of values."""

    sides: tuple[Side, Side]


class CodedLayer(PolicyLayer):
    """One layer's cache, coded as two streams say.

    It works on a model's heads, and on a compressed model's packed rows [batch_size, 1, seq_len, width] of 16 bits.
    Attention decodes the whole cache at each step. Where there is a `table`, keys are stored as before RoPE.

    Args:
        streams: of keys and of values.
    """

    new_sequence = CodedSequence
    sequences: list[CodedSequence]

    def __init__(self, streams: tuple[Stream, Stream]) -> None:
        super().__init__()
        self.streams = streams

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        self.update(self.streams[0].codec.typical(key_states), value_states)

    def store(self, sequence: CodedSequence, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(sequence, "sides"):
            sequence.sides = Side(self.streams[0], keys), Side(self.streams[1], values)
        index = torch.arange(sequence.tokens, device=keys.device)
        keys = sequence.sides[0].update(self.rotated(keys, -index[sequence.tokens - sequence.new :]))
        return behind_padding((self.rotated(keys, index), sequence.sides[1].update(values)), sequence.start)
