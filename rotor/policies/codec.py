"""What a codec is: it turns the numbers of some tokens into tensors that are stored, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..format.layout import LayerLayout

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
        if segments and _grouping(segments[-1]) == _grouping(parts):
            segments[-1] = tuple(torch.cat(pair, dim=2) for pair in zip(segments[-1], parts, strict=True))
        else:
            segments.append(parts)

    def take(self, parts: Parts, slots: Tensor) -> Parts:
        """The tokens `slots`, [batch_size, 1 or heads, kept]; of codes by token."""
        return tuple(slots_of(part, slots) for part in parts)


class Exact(Codec):
    """Stores the numbers as they are: the case of 16 bits."""

    def encode(self, states: Tensor) -> Parts:
        return (states.clone(),)  # of its own: a view would keep alive what it was cut from

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class ByGroup(Codec):
    """Packed rows of a compressed layer, the columns of each group apart: groups keep tokens of their own.

    codec: codes one group. spans: its columns. Parts: the codec's, group after group.
    """

    codec: Codec
    spans: tuple[slice, ...]

    def encode(self, states: Tensor) -> Parts:
        return tuple(part for span in self.spans for part in self.codec.encode(states[..., span]))

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        widths = [span.stop - span.start for span in self.spans]
        groups = zip(self._of_each(parts), widths, strict=True)
        return torch.cat([self.codec.decode(own, num_heads, wide) for own, wide in groups], -1)

    def take(self, parts: Parts, slots: Tensor) -> Parts:
        each = slots.expand(-1, len(self.spans), -1).split(1, dim=1)
        groups = zip(self._of_each(parts), each, strict=True)
        return tuple(part for own, chosen in groups for part in self.codec.take(own, chosen))

    def _of_each(self, parts: Parts) -> list[Parts]:
        count = len(parts) // len(self.spans)
        return [parts[at : at + count] for at in range(0, len(parts), count)]


def spans_of(layout: LayerLayout, element_bytes: int) -> list[tuple[slice, ...]]:
    """Where each group lies in the elements (of rows of codes: bytes) of a compressed layer's key and value rows."""
    unit = 1 if layout.coded else element_bytes
    starts = layout.byte_offsets(element_bytes)
    ends = [*starts[1:], layout.row_bytes(element_bytes)]
    keys, values = (
        tuple(slice(start[side] // unit, end[side] // unit) for start, end in zip(starts, ends, strict=True))
        for side in (0, 1)
    )
    return [keys, tuple(slice(0, 0) for _ in starts) if layout.joint else values]


def slots_of(rows: Tensor, order: Tensor) -> Tensor:
    """The slots `order`, [batch_size, 1 or heads, kept], of rows [batch_size, heads, slots, *]."""
    index = order.to(rows.device).expand(-1, rows.shape[1], -1).unsqueeze(-1)  # an offloaded layer's are on the CPU
    return rows.gather(2, index.expand(-1, -1, -1, rows.shape[-1]))


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
