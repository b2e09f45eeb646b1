"""One side, keys or values, of the cache of some rows of a batch: coded segments and the newest tokens as they came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .codec import Codec, Parts


@dataclass(frozen=True)
class Stream:
    """How the tokens of one side come to be coded.

    codec: codes them. block: tokens that are coded together; fewer wait, exactly, until there are so many.
    window: newest tokens that stay exact. whole_prompt: the first tokens are coded at once, whatever their number.
    prompt_codec: codes the first tokens, if that differs; `codec` reads what it stores.
    exact_step: attention reads a token exactly in the step that brings it.
    """

    codec: Codec
    block: int = 1
    window: int = 0
    whole_prompt: bool = False
    prompt_codec: Codec | None = None
    exact_step: bool = False

    @property
    def waits(self) -> bool:
        """Whether new tokens are exact at first; else attention reads their codes from the step that brings them."""
        return self.block > 1 or self.window > 0 or self.exact_step

    @property
    def longest_step(self) -> int | None:
        """The longest step after the prompt whose tokens see what they would see in steps of one; None: any."""
        if not self.waits:
            return None
        return self.block if self.whole_prompt and self.window == 0 else 1

    def ready(self, waiting: int, prompt: bool) -> int:
        """How many of the oldest waiting tokens are coded now."""
        if prompt and self.whole_prompt:
            return waiting
        return max(0, waiting - self.window) // self.block * self.block


class Side:
    """The keys, or the values, of rows that are stored together; all of them have the same tokens.

    Args:
        like: [batch_size, num_heads, *, width], what the first states look like.
    """

    def __init__(self, stream: Stream, like: Tensor) -> None:
        self.stream = stream
        self.num_heads, self.width = like.shape[1], like.shape[3]
        self.segments: list[Parts] = []
        self.waiting = like[:, :, :0].clone()

    @property
    def tokens(self) -> int:
        return sum(parts[0].shape[2] for parts in self.segments) + self.waiting.shape[2]

    def update(self, states: Tensor) -> Tensor:
        """Store tokens; returns what this step's attention sees of all tokens, [batch_size, num_heads, tokens, width].

        The prompt (the first tokens) sees itself exactly.
        """
        prompt = not self.tokens
        visible = states if prompt else torch.cat([self.decode(), states], dim=2) if self.stream.waits else None
        self._push(states, prompt)
        return self.decode() if visible is None else visible

    def decode(self) -> Tensor:
        """All tokens, in the dtype in which they came."""
        codec, dtype = self.stream.codec, self.waiting.dtype
        pieces = [codec.decode(parts, self.num_heads, self.width).to(dtype) for parts in self.segments]
        if self.waiting.shape[2] or not pieces:
            pieces.append(self.waiting)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _push(self, states: Tensor, prompt: bool) -> None:
        stream = self.stream
        waiting = torch.cat([self.waiting, states], dim=2) if self.waiting.shape[2] else states
        count = stream.ready(waiting.shape[2], prompt)
        if count and prompt:
            (stream.prompt_codec or stream.codec).append(self.segments, waiting[:, :, :count])
        elif count:
            for block in waiting[:, :, :count].split(count if stream.codec.by_token else stream.block, dim=2):
                stream.codec.append(self.segments, block)
        self.waiting = waiting[:, :, count:].clone()  # a view would keep alive what was coded

    def take(self, slots: Tensor) -> None:
        """Keep the tokens `slots`, [batch_size, 1 or groups, kept], of a side where none waits."""
        self.segments = [self.stream.codec.take(parts, slots) for parts in self.segments]

    def map(self, function: Callable[[Tensor], Tensor]) -> Side:
        """The same with each tensor replaced."""
        other = copy(self)
        other.segments = [tuple(function(part) for part in parts) for parts in self.segments]
        other.waiting = function(self.waiting)
        return other


def stored_tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors in sides, nested lists, tuples, dicts and tensor subclasses (as quanto's)."""
    if isinstance(value, Side):
        value = [value.segments, value.waiting]
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from stored_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from stored_tensors(item)


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in `value` (see stored_tensors)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in stored_tensors(value))
