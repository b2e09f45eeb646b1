"""Policies that code keys and values: what the methods share, and the cache layer around two sides of coded tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.layout import LayerLayout
from ..errors import UsageError
from ..runtime.steps import AttentionCall
from .layer import PolicyLayer, StoredSequence, behind_padding
from .policy import LayerSample, Policy
from .store import Side, Stream, spans_of


class Quantiser(Policy):
    """A policy that codes every token."""

    @abstractmethod
    def streams(self) -> tuple[Stream, Stream]:
        """Streams by which keys and values are coded."""

    def beyond_windows(self) -> Quantiser:
        """The policy for models with sliding windows too, to measure what its codes cost there.

        Attention is as ever, but the cache keeps tokens that have left the window, and knows no padding: nothing to
        serve from.
        """
        widened = copy(self)
        object.__setattr__(widened, "holds_windows", True)
        return widened

    def check_rows(self, coded: bool, post_rope: bool) -> None:
        if coded:
            raise UsageError(
                f"cache policy {self.method}: it quantises, and this checkpoint's rows are codes already.",
                "Use --cache none. A policy that quantises is for rows of numbers: rotor calibrate MODEL -o RUN "
                "--recipe rotor-16.",
            )

    @property
    def longest_step(self) -> int | None:
        return min((step for step in (stream.longest_step for stream in self.streams()) if step), default=None)

    @property
    def block(self) -> int:
        """Tokens that are coded together, and wait uncoded until there are so many."""
        return max(stream.block for stream in self.streams())

    def layers(self, count: int) -> list[PolicyLayer]:
        return [CodedLayer(self.streams()) for _ in range(count)]


class FittedQuantiser(Quantiser):
    """A quantiser whose levels are fitted to calibration text, layer by layer. Keys are coded before RoPE.

    levels: the fit of each layer; empty before fitting.
    """

    levels: tuple[Any, ...] = ()

    @abstractmethod
    def fit_layer(self, sample: LayerSample) -> Any:
        """Fit a layer."""

    def fitted(self, samples: Sequence[LayerSample]) -> FittedQuantiser:
        fitted = copy(self)
        object.__setattr__(fitted, "levels", tuple(self.fit_layer(sample) for sample in samples))
        return fitted

    @abstractmethod
    def streams_of(self, fit: Any) -> tuple[Stream, Stream]:
        """Streams of a layer, given its fit."""

    def streams(self) -> tuple[Stream, Stream]:
        """The streams of the first layer; in all layers the same tokens wait."""
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
        return [CodedLayer(self.streams_of(fit)) for fit in self.levels]


class CodedSequence(StoredSequence):
    """Store of a coded layer for one sequence. sides: keys and values."""

    sides: tuple[Side, Side]


class CodedLayer(PolicyLayer):
    """One layer's cache, coded by two streams.

    It works on a model's heads, and on a compressed model's rows of 16-bit numbers, [batch_size, 1, seq_len, width].
    Attention decodes the whole cache at each step. With a `table`, keys are stored before RoPE.

    Args:
        streams: how keys and values are coded.
    """

    new_sequence = CodedSequence
    sequences: list[CodedSequence]

    def __init__(self, streams: tuple[Stream, Stream]) -> None:
        super().__init__()
        self.streams = streams

    def follow(self, layout: LayerLayout, dtype: torch.dtype) -> None:
        spans = spans_of(layout, dtype.itemsize)
        self.streams = self.streams[0].of_rows(spans[0]), self.streams[1].of_rows(spans[1])

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        if not self.is_initialized:
            self.follow(call.parameters.layout, call.value.dtype)
        return super().store_and_attend(call)

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        self.update(self.streams[0].codec.typical(key_states), value_states)

    def store(self, sequence: CodedSequence, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(sequence, "sides"):
            sequence.sides = Side(self.streams[0], keys), Side(self.streams[1], values)
        index = torch.arange(sequence.tokens, device=keys.device)
        keys = sequence.sides[0].update(self.rotated(keys, -index[sequence.tokens - sequence.new :]))
        return behind_padding((self.rotated(keys, index), sequence.sides[1].update(values)), sequence.start)
