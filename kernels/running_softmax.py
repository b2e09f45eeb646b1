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

from rotor.format.layout import GroupClass

from .parameters import AttentionParameters, masked, pressed
from .reference import rotate

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
    parameters: AttentionParameters,
    kv_len: int,
    mask: Mask,
    rotation: Rotation | None = None,
    causal: bool = False,
    step: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attention of all query heads, class by class.

    Args:
        query: as `AttentionParameters.queries` takes it.
        rows: of a class its keys and its values.
        rotation: in domain `pre`.
        causal: queries are the keys: those before a block see nothing of it, and the mask leaves them out.
        step: what the first key of a block is a multiple of.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank], and the log-sum-exp of each query head's logits,
        [batch_size, seq_len, num_heads], -inf where it attends to nothing; float32 or wider, groups in the order of the
        layout.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    outputs, sums = [], []
    for cls in parameters.layout.classes():
        rebuilding = None
        if parameters.layout.domain == "pre":
            assert rotation is not None
            rebuilding = _Rebuilding(parameters.basis(cls), parameters.constant(cls), partial(rotation, cls))
        attended, log_sums = _running_softmax(
            parameters.queries(query, cls).to(dtype), *rows(cls), rebuilding, parameters, parameters.heads(cls), mask,
            causal, kv_len, step,
        )  # fmt: skip
        outputs.append(attended.permute(0, 3, 1, 2, 4).flatten(2))
        sums.append(log_sums.permute(0, 3, 1, 2, 4).flatten(2))
    return torch.cat(outputs, dim=-1), torch.cat(sums, dim=-1)


@dataclass(frozen=True)
class _Rebuilding:
    """Keys of domain `pre` from their latents: basis [count, size, head_dim, rank], constant [count, size, head_dim] or
    None.
    """

    basis: Tensor
    constant: Tensor | None
    rotation: Callable[[int, int], tuple[Tensor, Tensor]]

    def __call__(self, latents: Tensor, start: int) -> Tensor:
        """[batch_size, count, block, rank] -> rotated keys [batch_size, count, size, block, head_dim]."""
        keys = latents[:, :, None] @ self.basis.mT
        if self.constant is not None:
            keys = keys + self.constant.unsqueeze(2)
        return rotate(keys, *self.rotation(start, start + keys.shape[3]))


def _running_softmax(
    queries: Tensor,
    keys: Rows,
    values: Rows,
    rebuilding: _Rebuilding | None,
    parameters: AttentionParameters,
    of_heads: slice,
    mask: Mask,
    causal: bool,
    kv_len: int,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Attention of queries [batch_size, count, heads of a group, seq_len, width], float32 or wider.

    Returns [batch_size, count, heads of a group, seq_len, v_rank], zeros for queries that attend to nothing, and the
    log-sum-exp of the logits, [batch_size, count, heads of a group, seq_len, 1].
    """
    batch_size, count, heads, seq_len, _ = queries.shape
    if not kv_len:
        nothing = queries.new_full((batch_size, count, heads, seq_len, 1), -torch.inf)
        return queries.new_zeros(batch_size, count, heads, seq_len, values.rank), nothing
    largest = total = weighted = queries.new_empty(0)  # set by the first block
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
        logits = pressed(logits, parameters.scaling, parameters.softcap)
        logits = masked(logits, mask(of_heads, start, end))
        block_largest = logits.amax(-1, keepdim=True)
        new_largest = block_largest if start == 0 else torch.maximum(largest[..., rows, :], block_largest)
        reference = new_largest.masked_fill(new_largest == -torch.inf, 0.0)
        weight = torch.exp(logits - reference)
        numbers = values.block(start, end).to(weight.dtype)
        attended = (weight.flatten(2, 3) @ numbers).unflatten(2, weight.shape[2:4])
        if start == 0:  # which all queries may see
            largest, total, weighted = new_largest.clone(), weight.sum(-1, keepdim=True), attended
            continue
        shrink = torch.exp(largest[..., rows, :] - reference)
        largest[..., rows, :] = new_largest
        total[..., rows, :] = total[..., rows, :] * shrink + weight.sum(-1, keepdim=True)
        weighted[..., rows, :] = weighted[..., rows, :] * shrink + attended
    return weighted / total.masked_fill(total == 0.0, 1.0), largest + total.log()
