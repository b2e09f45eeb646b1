"""Codes of the rows that an evicting cache holds: each token by itself, so that any of them can be dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .affine import AffineCode
from .codec import Parts, tensor_bytes
from .spans import slots_of


class KeptCodes:
    """The keys, or the values, of the tokens that are held, coded as the policy `per-token` does.

    Args:
        spans: of packed rows, the columns of each group, which keeps tokens of its own and so is coded by itself.
        like: [batch_size, num_heads, *, width], what the rows look like.
    """

    def __init__(self, bits: int, group: int, spans: Sequence[slice] | None, like: Tensor) -> None:
        self._codec = AffineCode(bits, 1, group)
        self._spans = list(spans) if spans is not None else [slice(0, like.shape[3])]
        self._heads, self._dtype = like.shape[1], like.dtype
        self._widths = [len(range(*span.indices(like.shape[3]))) for span in self._spans]
        self._parts: list[Parts] = []

    @property
    def tokens(self) -> int:
        return self._parts[0][0].shape[2] if self._parts else 0

    @property
    def stored_bytes(self) -> int:
        return tensor_bytes(self._parts)

    def append(self, states: Tensor) -> None:
        """Code tokens, [batch_size, num_heads, tokens, width], behind those that are held."""
        new = [self._codec.encode(states[..., span]) for span in self._spans]
        if self._parts:
            pairs = zip(self._parts, new, strict=True)
            new = [tuple(torch.cat(both, dim=2) for both in zip(old, more, strict=True)) for old, more in pairs]
        self._parts = new

    def decode(self) -> Tensor:
        """[batch_size, num_heads, tokens, width], in the dtype in which they came."""
        pieces = zip(self._parts, self._widths, strict=True)
        return torch.cat([self._codec.decode(parts, self._heads, width) for parts, width in pieces], -1).to(self._dtype)

    def take(self, order: Tensor) -> None:
        """Keep the slots `order`, [batch_size, 1 or groups, kept]; groups are spans, or heads."""
        several = len(self._parts) > 1 and order.shape[1] > 1
        for index, parts in enumerate(self._parts):
            own = order[:, index : index + 1] if several else order
            self._parts[index] = tuple(slots_of(part, own) for part in parts)

    def cut(self, rest: int) -> None:
        """Keep the oldest `rest` tokens."""
        self.map(lambda part: part[:, :, :rest].clone())

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor."""
        self._parts = [tuple(function(part) for part in parts) for parts in self._parts]
