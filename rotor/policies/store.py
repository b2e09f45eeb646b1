"""Storage of tokens: codecs, and one side (keys or values) of the cache of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checkpoint.layout import LayerLayout

Parts = tuple[Tensor, ...]
"""The stored tensors of a run of tokens, [batch_size, *, n, *] each. Dimension 2 grows with the tokens: in the first
tensor it is the tokens, in others it may be groups of them."""


class Codec(ABC):
    """Codes the keys or the values of tokens.

    ragged: equally many tokens may take different sizes.
    """

    ragged: ClassVar[bool] = False

    @abstractmethod
    def encode(self, states: Tensor) -> Parts:
        """Code `states`, [batch_size, num_heads, tokens, width], into the tensors to store."""

    @abstractmethod
    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        """Decode to [batch_size, num_heads, tokens, width], float32."""

    def typical(self, states: Tensor) -> Tensor:
        """Turn random states into ones with a typical coded size, for counting bytes."""
        return states

    def of_rows(self, spans: tuple[slice, ...]) -> Codec:
        """The codec for a compressed layer's rows, in which the latent of each group lies in one of `spans`."""
        return self

    def append(self, segments: list[Parts], states: Tensor) -> None:
        """Code tokens and store them behind the others, in one piece with them where their groups are alike."""
        parts = self.encode(states)
        if segments and (self.ragged or _grouping(segments[-1]) == _grouping(parts)):
            segments[-1] = tuple(torch.cat(pair, dim=2) for pair in zip(segments[-1], parts, strict=True))
        else:
            segments.append(parts)


def spans_of(layout: LayerLayout, element_bytes: int) -> list[tuple[slice, ...]]:
    """Where each group lies in the elements of a compressed layer's key and value rows."""
    unit = layout.element_bytes(element_bytes)
    starts = layout.byte_offsets(element_bytes)
    ends = [*starts[1:], layout.row_bytes(element_bytes)]
    keys, values = (
        tuple(slice(start[side] // unit, end[side] // unit) for start, end in zip(starts, ends, strict=True))
        for side in (0, 1)
    )
    nothing = tuple(slice(0, 0) for _ in starts)
    return [keys, values if layout.stored_value_rank else nothing]


def _grouping(parts: Parts) -> list[tuple[float, torch.Size]]:
    """Tokens that an entry of dimension 2 stands for in each part, and the shape behind that dimension."""
    tokens = parts[0].shape[2]
    return [(tokens / part.shape[2], part.shape[3:]) for part in parts]


def heads_together(states: Tensor) -> Tensor:
    """[batch_size, num_heads, tokens, width] -> [batch_size, 1, tokens, num_heads * width]."""
    return states.transpose(1, 2).flatten(2).unsqueeze(1)


def heads_apart(rows: Tensor, num_heads: int) -> Tensor:
    """The inverse of heads_together."""
    return rows[:, 0].unflatten(-1, (num_heads, -1)).transpose(1, 2)


@dataclass(frozen=True)
class Stream:
    """When and how the tokens of one side are coded.

    codec: codes and decodes them. block: tokens that are coded together; until there are so many, they wait uncoded.
    window: newest tokens that stay uncoded. whole_prompt: the prompt is coded at once, whatever its length.
    prompt_codec: codes the prompt, if that differs; `codec` decodes it.
    first: first tokens of a sequence that stay uncoded.
    """

    codec: Codec
    block: int = 1
    window: int = 0
    whole_prompt: bool = False
    prompt_codec: Codec | None = None
    first: int = 0

    @property
    def waits(self) -> bool:
        """Tell whether new tokens are uncoded at first; else attention reads their codes from their own step on."""
        return self.block > 1 or self.window > 0

    @property
    def longest_step(self) -> int | None:
        """The longest step after the prompt whose tokens see what they would see in steps of one; None: any."""
        if not self.waits:
            return None
        return self.block if self.whole_prompt and self.window == 0 else 1

    def of_rows(self, spans: tuple[slice, ...]) -> Stream:
        """The stream for a compressed layer's rows, see Codec.of_rows."""
        prompt_codec = None if self.prompt_codec is None else self.prompt_codec.of_rows(spans)
        return replace(self, codec=self.codec.of_rows(spans), prompt_codec=prompt_codec)

    def ready(self, waiting: int, prompt: bool) -> int:
        """Number of the oldest waiting tokens that are coded now."""
        if prompt and self.whole_prompt:
            return waiting
        return max(0, waiting - self.window) // self.block * self.block


class Stored:
    """Base of what caches store: attributes that are tensors, or hold some, are part of the cache."""


class Side(Stored):
    """The keys, or the values, of a sequence.

    Args:
        like: [1, num_heads, *, width], states with the heads, width and dtype of those to come.
    """

    def __init__(self, stream: Stream, like: Tensor) -> None:
        self.stream = stream
        self.num_heads, self.width = like.shape[1], like.shape[3]
        self.segments: list[Parts] = []
        self.first = self.waiting = like[:, :, :0].clone()

    @property
    def tokens(self) -> int:
        return self.first.shape[2] + sum(parts[0].shape[2] for parts in self.segments) + self.waiting.shape[2]

    def update(self, states: Tensor) -> Tensor:
        """Store tokens; returns all tokens as this step's attention sees them, [1, num_heads, tokens, width].

        The prompt (the first tokens) sees itself exactly.
        """
        prompt = not self.tokens
        visible = states if prompt else torch.cat([self.decode(), states], dim=2) if self.stream.waits else None
        self._push(states, prompt)
        return self.decode() if visible is None else visible

    def decode(self) -> Tensor:
        """Decode all tokens, to the dtype in which they came."""
        codec, dtype = self.stream.codec, self.waiting.dtype
        decoded = [codec.decode(parts, self.num_heads, self.width).to(dtype) for parts in self.segments]
        decoded += [self.waiting] if self.waiting.shape[2] or not decoded else []
        whole = [self.first, *decoded] if self.first.shape[2] else decoded
        return whole[0] if len(whole) == 1 else torch.cat(whole, dim=2)

    def _push(self, states: Tensor, prompt: bool) -> None:
        stream = self.stream
        kept = min(stream.first - self.first.shape[2], states.shape[2])
        if kept:
            self.first, states = torch.cat([self.first, states[:, :, :kept]], dim=2), states[:, :, kept:]
        waiting = torch.cat([self.waiting, states], dim=2) if self.waiting.shape[2] else states
        count = stream.ready(waiting.shape[2], prompt)
        if count and prompt:
            (stream.prompt_codec or stream.codec).append(self.segments, waiting[:, :, :count])
        elif count:
            for block in waiting[:, :, :count].split(stream.block if stream.block > 1 else count, dim=2):
                stream.codec.append(self.segments, block)
        self.waiting = waiting[:, :, count:].clone()  # a view would keep alive what was coded


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` with each tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, function) for item in value)
    if isinstance(value, Stored):
        other = copy(value)
        vars(other).update({name: mapped(item, function) for name, item in vars(value).items()})
        return other
    return value


def stored_tensors(value: object) -> Iterator[Tensor]:
    """The plain tensors in stored objects, nested lists, tuples, dicts and tensor subclasses (such as quanto's)."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from stored_tensors(getattr(value, name))
        else:
            yield value
        return
    items = vars(value) if isinstance(value, Stored) else value
    if isinstance(items, (dict, list, tuple)):
        for item in items.values() if isinstance(items, dict) else items:
            yield from stored_tensors(item)


def tensor_bytes(value: object) -> int:
    """Bytes of the tensors in `value` (see stored_tensors)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in stored_tensors(value))
