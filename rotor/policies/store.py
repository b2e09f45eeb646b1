"""One side, keys or values, of the cache of some rows of a batch: coded segments and the newest tokens as they came."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UsageError
from .codec import Codec, Parts, tensor_bytes


@dataclass(frozen=True)
class Stream:
    """How the tokens of one side come to be coded.

    codec: codes them. block: tokens that are coded together; fewer wait, exactly, until there are so many.
    window: newest tokens that stay exact. whole_prompt: the first tokens are coded at once, whatever their number.
    prompt_codec: codes the first tokens, if that differs; `codec` reads what it stores.
    """

    codec: Codec
    block: int = 1
    window: int = 0
    whole_prompt: bool = False
    prompt_codec: Codec | None = None

    @property
    def waits(self) -> bool:
        """Whether new tokens are exact at first; else attention reads their codes from the step that brings them."""
        return self.block > 1 or self.window > 0

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
    def empty(self) -> bool:
        return not self.segments and self.waiting.shape[2] == 0

    @property
    def stored_bytes(self) -> int:
        return tensor_bytes([self.segments, self.waiting])

    def update(self, states: Tensor) -> Tensor:
        """Store tokens; returns what this step's attention sees of all tokens, [batch_size, num_heads, tokens, width].

        The prompt (the first tokens) sees itself exactly.
        """
        prompt = self.empty
        if prompt:
            seen = states
        elif self.stream.waits:
            seen = torch.cat([self.decode(), states], dim=2)
        self._push(states, prompt)
        return seen if prompt or self.stream.waits else self.decode()

    def decode(self) -> Tensor:
        """All tokens, in the dtype in which they came."""
        codec, dtype = self.stream.codec, self.waiting.dtype
        coded = [codec.decode(parts, self.num_heads, self.width).to(dtype) for parts in self.segments]
        return torch.cat([*coded, self.waiting], dim=2)

    def _push(self, states: Tensor, prompt: bool) -> None:
        stream = self.stream
        waiting = torch.cat([self.waiting, states], dim=2)
        count = stream.ready(waiting.shape[2], prompt)
        if count:
            if prompt:
                (stream.prompt_codec or stream.codec).append(self.segments, waiting[:, :, :count])
            else:
                for block in waiting[:, :, :count].split(count if stream.codec.by_token else stream.block, dim=2):
                    stream.codec.append(self.segments, block)
        self.waiting = waiting[:, :, count:].clone()  # a view would keep alive what was coded

    def crop(self, count: int) -> None:
        """Remove the newest tokens.

        Raises:
            UsageError: they are coded together with older ones.
        """
        exact = min(count, self.waiting.shape[2])
        coded = count - exact
        if coded and not self.stream.codec.by_token:
            raise UsageError(
                f"crop({-count}): only the newest {exact} tokens are not yet coded together with older ones.",
                "Crop fewer tokens, or use a cache policy that codes each token by itself (per-token, fp8).",
            )
        self.waiting = self.waiting[:, :, : self.waiting.shape[2] - exact].clone()
        while coded and self.segments:
            parts = self.segments.pop()
            tokens = parts[0].shape[2]
            if tokens > coded:
                kept = (p[:, :, : tokens - coded].clone() if p.shape[2] == tokens else p for p in parts)
                self.segments.append(tuple(kept))
            coded = max(0, coded - tokens)

    def map(self, function: Callable[[Tensor], Tensor]) -> Side:
        """The same with each tensor replaced."""
        other = copy(self)
        other.segments = [tuple(function(part) for part in parts) for parts in self.segments]
        other.waiting = function(self.waiting)
        return other
