"""Logits of keys before RoPE by rebuilding them, for one query position in plain PyTorch on a CPU."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rotor.format.columns import Columns

from .decode_latents import byte_order_of, in_dtype, product_dtype, scratch, wide

_turns: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cosines -> the turns made of them: all layers of a step share one table."""


def turns_of(key_rotation: tuple[Tensor, Tensor], head_dim: int, dtype: torch.dtype) -> Tensor:
    """The turns of all planes of a head, [kv_len, head_dim / 2], complex of the precision of `dtype`.

    Planes are those of RoPE, then pairs of the dimensions that it leaves as they are (`plane_rows`).
    """
    cos, sin = key_rotation
    known = _turns.get(cos)
    if known is None or known[0] is not sin or known[1] != (head_dim, dtype):
        half = cos.shape[-1] // 2
        turns = torch.ones(len(cos), head_dim // 2, dtype=torch.promote_types(dtype, torch.complex64))
        turns[:, :half] = torch.complex(cos[:, :half].to(dtype), sin[:, :half].to(dtype))
        known = _turns[cos] = sin, (head_dim, dtype), turns
    return known[2]


@lru_cache(maxsize=64)
def plane_rows(head_dim: int, rotary_dim: int) -> Tensor:
    """The rows of a head, both of a plane side by side."""
    rest = (head_dim - rotary_dim) // 2
    first = [*range(rotary_dim // 2), *range(rotary_dim, rotary_dim + rest)]
    second = [*range(rotary_dim // 2, rotary_dim), *range(rotary_dim + rest, head_dim)]
    return torch.tensor([first, second]).T.flatten()


class Rebuilding:
    """Logits of keys before RoPE, for queries of one position.

    A plane of a key is a complex number, which RoPE multiplies with its turn. For that, and for the product with the
    queries, the keys of a head lie side by side.

    Args:
        basis: [count, size, head_dim, rank]. columns, dtype: of the latents.
        constant: [count, size, head_dim], added to rebuilt keys before their rotation, or None.
        key_rotation: cos and sin [kv_len, rotary_dim].
    """

    step = 1
    """Keys that are taken together."""

    def __init__(
        self,
        basis: Tensor,
        columns: Columns | None,
        dtype: torch.dtype,
        constant: Tensor | None,
        key_rotation: tuple[Tensor, Tensor],
    ) -> None:
        self.dtype = wide(dtype)
        self.turns = turns_of(key_rotation, basis.shape[2], self.dtype)
        self.plane_rows = plane_rows(basis.shape[2], key_rotation[0].shape[-1])
        basis, factors = basis.transpose(0, 1), None
        if columns is not None:
            order, factors = byte_order_of(columns, dtype.itemsize)
            basis = basis.index_select(3, order)
        basis = basis.index_select(2, self.plane_rows).to(product_dtype(dtype))
        if factors is not None:
            basis /= factors
        self.basis = basis.mT  # [size, count, rank, head_dim]
        self.shape = basis.shape[:3]
        self.constant = None
        if constant is not None:
            self.constant = constant[..., self.plane_rows].transpose(0, 1).unsqueeze(2).to(self.dtype)

    @cached_property
    def basis_of_all(self) -> Tensor:
        """[count, rank, size * head_dim]."""
        size, count, head_dim = self.shape
        return self.basis.mT.transpose(0, 1).reshape(count, size * head_dim, -1).mT

    def queries(self, queries: Tensor) -> Tensor:
        """[count, heads of a group, head_dim], rotated -> as `logits` takes them."""
        return queries[..., self.plane_rows].unflatten(1, (self.shape[0], -1)).transpose(0, 1).flatten(0, 1)

    @property
    def rows(self) -> int:
        """Numbers that are rebuilt of a key."""
        return math.prod(self.shape)

    def logits(self, queries: Tensor, latents: Tensor, start: int) -> Tensor:
        """Of the keys from `start` on.

        Args:
            queries: [size * count, heads_per_kv, head_dim], of `queries`. latents: [count, keys, rank].
        Returns:
            [count, heads of a group, keys].
        """
        size, count, head_dim = self.shape
        keys, dtype = latents.shape[1], self.basis.dtype
        factor = in_dtype(latents, dtype, "factor")
        rebuilt = scratch("rebuilt", (size, count, keys, head_dim), self.dtype)
        if dtype == self.dtype:
            for of_head, basis in zip(rebuilt.unbind(0), self.basis.unbind(0), strict=True):
                torch.bmm(factor, basis, out=of_head)
        else:  # what is converted may change its order
            product = scratch("product", (count, keys, size * head_dim), dtype)
            torch.bmm(factor, self.basis_of_all, out=product)
            rebuilt.copy_(product.unflatten(-1, (size, head_dim)).permute(2, 0, 1, 3))
        if self.constant is not None:
            rebuilt += self.constant
        planes = torch.view_as_complex(rebuilt.view(size, count, keys, -1, 2))
        planes *= self.turns[start : start + keys]
        logits = torch.bmm(queries, rebuilt.flatten(0, 1).mT)
        return logits.unflatten(0, (size, count)).transpose(0, 1).flatten(1, 2)
