"""Logits of keys that are stored turned within blocks of positions, for one query position in plain PyTorch on a CPU.

What turns all keys of a block to its beginning is one rotation: it is the query that is turned back, once a block, and
projected into the latents. No key is rebuilt.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rotor.format.columns import Columns

from .decode_latents import byte_order_of, in_dtype, scratch, wide
from .rebuilding import plane_rows, turns_of


def begins_a_block(key_rotation: tuple[Tensor, Tensor], rope_block: int) -> bool:
    """Whether the first of the keys that turn by these rows is the first of its block.

    A window lets go of keys one by one.
    """
    return all(torch.equal(table[0], table[:rope_block][-1]) for table in key_rotation)


class TurnedQueries:
    """Takes the place of `Rebuilding` for a layer whose keys are turned within blocks of `step` positions.

    Args:
        basis: [count, size, head_dim, rank]. columns, dtype: of the latents.
        constant: [count, size, head_dim], added to keys as they are read, or None.
        key_rotation: cos and sin [kv_len, rotary_dim] that turn keys to the beginning of their block; the first key
            begins one.
    """

    def __init__(
        self,
        basis: Tensor,
        columns: Columns | None,
        dtype: torch.dtype,
        constant: Tensor | None,
        key_rotation: tuple[Tensor, Tensor],
        step: int,
    ) -> None:
        self.dtype, self.step, self.shape = wide(dtype), step, basis.shape[:3]
        self.turns = turns_of(key_rotation, basis.shape[2], self.dtype)[::step].conj()
        order = plane_rows(basis.shape[2], key_rotation[0].shape[-1])
        basis = basis.index_select(2, order).to(self.dtype)
        if columns is not None:
            columns_in_bytes, factors = byte_order_of(columns, dtype.itemsize)
            basis = basis.index_select(3, columns_in_bytes) / factors
        self.basis, self.plane_rows = basis.flatten(0, 1), order  # [count * size, head_dim, rank]
        self.constant = None if constant is None else constant[..., order].flatten(0, 1).unsqueeze(-1).to(self.dtype)

    @property
    def rows(self) -> int:
        """Numbers that are made for a key, at most."""
        return math.prod(self.shape)

    def queries(self, queries: Tensor) -> Tensor:
        """[count, heads of a group, head_dim], rotated -> complex planes, as `logits` takes them."""
        return torch.view_as_complex(queries[..., self.plane_rows].unflatten(-1, (-1, 2)).contiguous())

    def logits(self, queries: Tensor, latents: Tensor, start: int) -> Tensor:
        """Of the keys from `start` on, which begins a block.

        Args:
            queries: [count, heads of a group, head_dim / 2], of `queries`. latents: [count, keys, rank].
        Returns:
            [count, heads of a group, keys].
        """
        count, size, _ = self.shape
        keys, heads = latents.shape[1], queries.shape[1]
        blocks = -(-keys // self.step)
        turns = self.turns[start // self.step : start // self.step + blocks]
        turned = torch.view_as_real(queries.unflatten(1, (size, 1, -1)) * turns[:, None]).flatten(-2)
        of_heads = turned.flatten(0, 1).flatten(1, 2)  # [count * size, blocks * heads of a KV head, head_dim]
        absorbed = torch.bmm(of_heads, self.basis).unflatten(0, (count, size)).unflatten(2, (blocks, -1))
        absorbed = absorbed.transpose(1, 2).flatten(2, 3)  # [count, blocks, heads of a group, rank]
        factor = in_dtype(latents, self.dtype, "factor")
        whole = keys // self.step
        logits = scratch("turned logits", (count, heads, keys), self.dtype)
        found = logits[..., : whole * self.step].unflatten(-1, (whole, self.step))
        in_blocks = factor[:, : whole * self.step].unflatten(1, (whole, self.step))
        found.copy_((absorbed[:, :whole] @ in_blocks.mT).transpose(1, 2))
        if whole < blocks:
            logits[..., whole * self.step :] = absorbed[:, -1] @ factor[:, whole * self.step :].mT
        if self.constant is not None:
            of_constant = torch.bmm(of_heads, self.constant).unflatten(0, (count, size)).unflatten(2, (blocks, -1))
            added = of_constant.squeeze(-1).transpose(2, 3).flatten(1, 2)  # [count, heads of a group, blocks]
            logits += added.repeat_interleave(self.step, dim=-1)[..., :keys]
        return logits.clone()
