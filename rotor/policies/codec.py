"""What a codec is: it turns the numbers of some tokens into tensors that are stored, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]
"""The stored tensors of a run of tokens. The first is [batch_size, *, tokens, *]; all have the batch first, and in
dimension 2 something that grows with the tokens: the tokens themselves, or groups of them."""


class Codec(ABC):
    """Codes the keys or the values of tokens."""

    by_token = True
    """Whether a token's code depends on no other token, so that tokens can be cut off again."""

    @abstractmethod
    def encode(self, states: Tensor) -> Parts:
        """What is stored of `states`, [batch_size, num_heads, tokens, width]."""

    @abstractmethod
    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        """[batch_size, num_heads, tokens, width], float32 (or the dtype that was stored exactly)."""

    def append(self, segments: list[Parts], states: Tensor) -> None:
        """Code tokens and store them behind what is stored: in one piece with it where the groups are alike."""
        parts = self.encode(states)
        if segments and _joinable(segments[-1], parts):
            segments[-1] = tuple(torch.cat(pair, dim=2) for pair in zip(segments[-1], parts, strict=True))
        else:
            segments.append(parts)


class Exact(Codec):
    """Stores the numbers as they are: the case of 16 bits."""

    def encode(self, states: Tensor) -> Parts:
        return (states.clone(),)  # of its own: a view would keep alive what it was cut from

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        return parts[0]


def _joinable(first: Parts, second: Parts) -> bool:
    return len(first) == len(second) and _grouping(first) == _grouping(second)


def _grouping(parts: Parts) -> list[tuple[float, torch.Size]]:
    """For each part, how many tokens an entry of dimension 2 stands for, and the shape behind it."""
    tokens = parts[0].shape[2]
    return [(tokens / part.shape[2], part.shape[3:]) for part in parts]


def heads_together(states: Tensor) -> Tensor:
    """[batch_size, num_heads, tokens, width] -> [batch_size, 1, tokens, num_heads * width]."""
    return states.transpose(1, 2).flatten(2).unsqueeze(1)


def heads_apart(rows: Tensor, num_heads: int) -> Tensor:
    """The inverse of heads_together."""
    return rows[:, 0].unflatten(-1, (num_heads, -1)).transpose(1, 2)


def stored_tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors in nested lists, tuples, dicts and tensor subclasses (as quanto's), each where it occurs."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from stored_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from stored_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from stored_tensors(item)


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in `value` (see stored_tensors)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in stored_tensors(value))
