"""Policies that code keys and values: what the methods share, and the cache layer around two sides of coded tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from .layer import PolicyLayer, real_tokens
from .policy import Policy
from .store import Side, Stream


class Quantiser(Policy):
    """A policy that codes every token."""

    @abstractmethod
    def streams(self) -> tuple[Stream, Stream]:
        """How keys and values are coded."""

    @property
    def quantises(self) -> bool:
        return True

    @property
    def longest_step(self) -> int | None:
        return min((step for step in (stream.longest_step for stream in self.streams()) if step), default=None)

    def layers(self, count: int) -> list[PolicyLayer]:
        return [CodedLayer(self.streams()) for _ in range(count)]


class CodedLayer(PolicyLayer):
    """One layer's cache, coded as two streams say.

    It works on a model's heads, and on a compressed model's packed rows [batch_size, 1, seq_len, width] of 16 bits.

    Args:
        streams: of keys and of values.

    sides: of keys and of values, for all rows alike; where there is padding or a codec is ragged for each row by
    itself, without its padding, so that what is stored of a row does not depend on the others. Attention decodes the
    whole cache at each step. Where there is a `table`, keys are stored as before RoPE.
    """

    stored = ("sides",)

    def __init__(self, streams: tuple[Stream, Stream]) -> None:
        super().__init__()
        self.streams = streams
        self.sides: list[tuple[Side, Side]] | None = None
        self._apart = any(stream.codec.ragged for stream in streams)
        self._pads: list[int] | None = None

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        if mask is None or (self.is_initialized and (self._pads is None or max(self._pads) < self.num_tokens)):
            return  # else there is a row that is padding so far
        padding = (~real_tokens(mask, batch_size, mask.shape[-1], device)).sum(-1).tolist()
        self._pads = padding if any(padding) else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        if self._pads is None and self._apart:
            self._pads = [0] * len(key_states)
        if self._pads:
            key_states, value_states = key_states[:1], value_states[:1]
        key, value = self.streams
        self.sides = [(Side(key, key_states), Side(value, value_states)) for _ in self._pads or (0,)]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns the keys and values of all tokens, as this step's attention is to see them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        total = self.num_tokens + key_states.shape[-2]
        first = torch.tensor(self._pads or [0], device=key_states.device)[:, None, None]
        index = (torch.arange(total, device=key_states.device) - first).clamp(min=0)
        key_states = self.turned(key_states, -index[..., self.num_tokens :])
        key, value = self._update_side(0, key_states), self._update_side(1, value_states)
        self.num_tokens = total
        return self.turned(key, index), value

    def _update_side(self, side: int, states: Tensor) -> Tensor:
        assert self.sides is not None
        if self._pads is None:
            return self.sides[0][side].update(states)
        result = states.new_zeros(*states.shape[:2], self.num_tokens + states.shape[-2], states.shape[-1])
        for row, (sides, pads) in enumerate(zip(self.sides, self._pads, strict=True)):
            new = states[row : row + 1, :, max(0, pads - self.num_tokens) :]
            if new.shape[2]:
                visible = sides[side].update(new)
                result[row : row + 1, :, -visible.shape[2] :] = visible
        return result

    def reset(self) -> None:
        super().reset()
        self._pads = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._pads is None:
            super().batch_repeat_interleave(repeats)
        else:
            self.batch_select_indices(torch.arange(len(self._pads)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._pads is None:
            super().batch_select_indices(indices)
            return
        assert self.sides is not None
        chosen = indices.tolist()
        self._pads, self.sides = [self._pads[row] for row in chosen], [self.sides[row] for row in chosen]
        self.map(Tensor.clone)  # a row chosen twice has tensors of its own, as its bytes are counted
