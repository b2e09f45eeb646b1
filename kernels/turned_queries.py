"""Logits of keys that are stored turned within blocks of positions, for one query position in plain PyTorch on a CPU.

What turns all keys of a block to its beginning is one rotation: it is the query that is turned back, once a block, and
projected into the latents. No key is rebuilt.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rotor.format.columns import Columns

from .decode_latents import byte_order_of, in_dtype, wide
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
        if constant is not None:  # one more column: what a query makes of it is a logit of all keys of the block
            basis = torch.cat([basis, constant[..., order].unsqueeze(-1).to(self.dtype)], dim=-1)
        self.basis, self.plane_rows = basis.flatten(0, 1), order  # [count * size, head_dim, rank, or one more]
        self.has_constant = constant is not None

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
        blocks, whole = -(-keys // self.step), keys // self.step
        turns = self.turns[start // self.step : start // self.step + blocks]
        turned = torch.view_as_real(queries.unflatten(1, (size, 1, -1)) * turns[:, None]).flatten(-2)
        of_heads = turned.flatten(0, 1).flatten(1, 2)  # [count * size, blocks * heads of a KV head, head_dim]
        absorbed = torch.bmm(of_heads, self.basis).view(count, size, blocks, -1, self.basis.shape[-1])
        absorbed = absorbed.transpose(1, 2).flatten(2, 3)  # [count, blocks, heads of a group, rank]
        of_constant = absorbed[..., -1]
        absorbed = absorbed[..., : latents.shape[-1]]
        factor = in_dtype(latents, self.dtype, "factor")
        logits = queries.real.new_empty(count, heads, keys)
        for group, of_blocks, own in zip(factor, absorbed, logits, strict=True):
            in_blocks = group[: whole * self.step].unflatten(0, (whole, self.step))
            found = torch.bmm(of_blocks[:whole], in_blocks.mT)
            own[:, : whole * self.step].unflatten(1, (whole, self.step)).copy_(found.transpose(0, 1))
            if whole < blocks:
                own[:, whole * self.step :] = of_blocks[-1] @ group[whole * self.step :].mT
        if self.has_constant:
            added = of_constant.mT.unsqueeze(-1)  # [count, heads of a group, blocks, 1]
            logits[..., : whole * self.step].unflatten(-1, (whole, self.step)).add_(added[:, :, :whole])
            logits[..., whole * self.step :] += added[:, :, -1]
        return logits
