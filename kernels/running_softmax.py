"""Attention a block of keys at a time, in plain PyTorch: what rows hold is read, rebuilt and forgotten block by block.

How rows are read (packed in bytes, scattered over pages) is the caller's; so is what is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rotor.format.layout import GroupClass, LayerLayout

from .reference import class_basis, rotate

BLOCK_ELEMENTS_CPU = 1 << 18
BLOCK_ELEMENTS_GPU = 1 << 26
"""Logits of a block, or numbers that are unpacked or rebuilt for it; on a CPU what a core's cache holds."""

LEAST_BLOCK = 64
"""Keys of a block."""


class Rows(Protocol):
    """The latents of the groups of a class, of keys or of values."""

    @property
    def rank(self) -> int:
        """Numbers of a group's latent."""

    def block(self, start: int, end: int) -> Tensor:
        """The latents of the keys start ... end - 1, [batch_size, count, end - start, rank]."""


Rotation = Callable[[GroupClass, int, int], tuple[Tensor, Tensor]]
"""(class, start, end) -> cos and sin of these keys, broadcastable to [batch_size, count, size, end - start,
rotary_dim]."""

Mask = Callable[[slice, int, int], "Tensor | None"]
"""(query heads of a class, start, end) -> what is seen of these keys, broadcastable to [batch_size, heads, seq_len,
end - start]; bool (True: attend), added to the logits, or None where all is seen."""


def attend_in_blocks(
    query: Tensor,
    rows: Callable[[GroupClass], tuple[Rows, Rows]],
    layout: LayerLayout,
    heads_per_kv: int,
    scaling: float,
    kv_len: int,
    mask: Mask,
    projected: bool,
    query_basis: Tensor | None = None,
    rotation: Rotation | None = None,
    constant_key: Tensor | None = None,
    softcap: float | None = None,
    causal: bool = False,
    step: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attention of all query heads, class by class.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; if `projected`,
            [batch_size, seq_len, sum over query heads of qk_rank].
        rows: of a class its keys and its values.
        query_basis: [group_size * head_dim, qk_width], unless `projected`.
        rotation, constant_key: in domain `pre`; the latter, [num_kv_heads, head_dim], is added to rebuilt keys.
        softcap: bound that the logits are pressed below, before the mask; None for none.
        causal: queries are the keys: those before a block see nothing of it, and the mask leaves them out.
        step: what the first key of a block is a multiple of.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank], and the log-sum-exp of each query head's logits,
        [batch_size, seq_len, num_heads], -inf where it attends to nothing; float32 or wider, groups in the order of the
        layout.
    """
    size = layout.group_size
    wide = torch.promote_types(query.dtype, torch.float32)
    outputs, sums = [], []
    for cls in layout.classes():
        keys, values = rows(cls)
        of_heads = slice(cls.start * size * heads_per_kv, (cls.start + cls.count) * size * heads_per_kv)
        rebuilding = None
        if projected:
            first = cls.qk_offset * size * heads_per_kv
            width = cls.count * size * heads_per_kv * cls.qk_rank
            packed = query[..., first : first + width].unflatten(-1, (cls.count, -1, cls.qk_rank))
            queries = packed.permute(0, 2, 3, 1, 4)
        else:
            assert query_basis is not None
            queries = query[:, of_heads].unflatten(1, (cls.count, size * heads_per_kv))
            basis = class_basis(query_basis, cls).unflatten(1, (size, -1))  # [count, size, head_dim, rank]
            if layout.domain == "post":
                split = queries.unflatten(2, (size, heads_per_kv))
                queries = torch.einsum("bngpsd,ngdr->bngpsr", split, basis).flatten(2, 3)
            else:
                assert rotation is not None
                rebuilding = _Rebuilding(basis, _of_class(constant_key, cls, size), partial(rotation, cls))
        attended, log_sums = _running_softmax(
            queries.to(wide), keys, values, rebuilding, scaling, of_heads, mask, causal, softcap, kv_len, step
        )
        outputs.append(attended.permute(0, 3, 1, 2, 4).flatten(2))
        sums.append(log_sums.permute(0, 3, 1, 2, 4).flatten(2))
    return torch.cat(outputs, dim=-1), torch.cat(sums, dim=-1)


@dataclass(frozen=True)
class _Rebuilding:
    """Keys of domain `pre` from their latents: basis [count, size, head_dim, rank], constant [count, size, 1, head_dim]
    or None.
    """

    basis: Tensor
    constant: Tensor | None
    rotation: Callable[[int, int], tuple[Tensor, Tensor]]

    def __call__(self, latents: Tensor, start: int) -> Tensor:
        """[batch_size, count, block, rank] -> rotated keys [batch_size, count, size, block, head_dim]."""
        keys = latents[:, :, None] @ self.basis.mT
        if self.constant is not None:
            keys = keys + self.constant
        return rotate(keys, *self.rotation(start, start + keys.shape[3]))


def _of_class(constant_key: Tensor | None, cls: GroupClass, size: int) -> Tensor | None:
    if constant_key is None:
        return None
    return constant_key[cls.start * size : (cls.start + cls.count) * size].unflatten(0, (cls.count, size)).unsqueeze(2)


def _running_softmax(
    queries: Tensor,
    keys: Rows,
    values: Rows,
    rebuilding: _Rebuilding | None,
    scaling: float,
    of_heads: slice,
    mask: Mask,
    causal: bool,
    softcap: float | None,
    kv_len: int,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Attention of queries [batch_size, count, heads of a group, seq_len, width], float32 or wider.

    Returns [batch_size, count, heads of a group, seq_len, v_rank], zeros for queries that attend to nothing, and the
    log-sum-exp of the logits, [batch_size, count, heads of a group, seq_len, 1].
    """
    batch_size, count, heads, seq_len, _ = queries.shape
    largest = queries.new_full((batch_size, count, heads, seq_len, 1), -torch.inf)
    total = torch.zeros_like(largest)
    weighted = queries.new_zeros(batch_size, count, heads, seq_len, values.rank)
    per_key = batch_size * count * max(heads * seq_len, keys.rank, values.rank)
    if rebuilding is not None:
        per_key = max(per_key, batch_size * count * rebuilding.basis.shape[1] * rebuilding.basis.shape[2])
    budget = BLOCK_ELEMENTS_CPU if queries.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    block = -(-max(LEAST_BLOCK, budget // per_key) // step) * step
    for start in range(0, kv_len, block):
        end = min(start + block, kv_len)
        rows = slice(start if causal else 0, None)  # earlier queries see none of these keys
        latents = keys.block(start, end)
        own = queries[..., rows, :]
        if rebuilding is None:
            logits = (own.flatten(2, 3) @ latents.to(own.dtype).mT).unflatten(2, own.shape[2:4])
        else:
            rebuilt = rebuilding(latents, start).to(own.dtype)
            grouped = own.unflatten(2, (rebuilt.shape[2], -1))
            logits = grouped.flatten(3, 4) @ rebuilt.mT
            logits = logits.unflatten(3, grouped.shape[3:5]).flatten(2, 3)
        logits = logits * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        seen = mask(of_heads, start, end)
        if seen is not None:
            if seen.dim() == 4:
                seen = seen.unflatten(1, (1, 1) if seen.shape[1] == 1 else logits.shape[1:3])
            logits = logits.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else logits + seen
        new_largest = torch.maximum(largest[..., rows, :], logits.amax(-1, keepdim=True))
        reference = new_largest.masked_fill(new_largest == -torch.inf, 0.0)
        weight = torch.exp(logits - reference)
        shrink = torch.exp(largest[..., rows, :] - reference)
        largest[..., rows, :] = new_largest
        total[..., rows, :] = total[..., rows, :] * shrink + weight.sum(-1, keepdim=True)
        numbers = values.block(start, end).to(weight.dtype)
        attended = (weight.flatten(2, 3) @ numbers).unflatten(2, weight.shape[2:4])
        weighted[..., rows, :] = weighted[..., rows, :] * shrink + attended
    return weighted / total.masked_fill(total == 0.0, 1.0), largest + total.log()
