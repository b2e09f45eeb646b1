"""The rotation of each block's first token, which a cache keeps where rotations do not follow from places in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UsageError
from ..kernels.rotary import Rotation

if TYPE_CHECKING:
    from transformers import Cache

    from ..kernels.passes import TokenSpan

BEGINNINGS = "rotor_beginnings"
"""Attribute of a cache: by the type of layers that RoPE tells apart and the size of blocks, cos and sin of each block's
beginning, [batch_size or 1, blocks, 2, planes]. It lies on the cache itself, as nothing else is copied, pickled and
dropped with it."""

Kept = dict[tuple[str | None, int], Tensor]


def rotations_of_blocks(
    given: Rotation, block: int, span: TokenSpan, cache: Cache | None, layer_type: str | None
) -> Tensor:
    """cos and sin of the first token of each block behind a pass, [batch_size or 1, blocks, 2, planes].

    Tokens that were taken back come anew, with the rotations of their new pass.

    Args:
        given: of the new tokens, [batch_size or 1, seq_len, rotary_dim] each, both halves equal.
        cache: keeps them; None: there are the new tokens alone.
    Raises:
        UsageError: the cache has tokens whose rotations are not known, or of other sequences.
    """
    planes, offset = given[0].shape[-1] // 2, span.query_offset
    new = torch.stack([side[..., :planes] for side in given], dim=2)
    count = -(-(span.kv_offset + span.kv_len) // block)
    place = torch.arange(count, device=new.device) * block - offset  # of beginnings among the new tokens
    begun = new[:, place.clamp(0, span.seq_len - 1)]
    if cache is None:
        return begun
    kept: Kept = getattr(cache, BEGINNINGS, {})
    held, fixed = kept.get((layer_type, block)), isinstance(offset, Tensor)
    start = None  # tokens in the cache, as far as the host knows
    if not fixed or offset.device.type == "cpu":
        start = int(offset)
    if held is None or start == 0:
        if start:
            raise _unknown(f"the cache holds {start} tokens whose rotations are unknown")
        setattr(cache, BEGINNINGS, kept | {(layer_type, block): begun})
        return begun
    if start is not None and start > held.shape[1] * block:
        raise _unknown(f"the cache holds {start} tokens, and the rotations of {held.shape[1]} blocks of {block}")
    if len(held) != len(begun) and 1 not in (len(held), len(begun)):
        raise _unknown(f"{len(begun)} sequences, and the cache holds the rotations of {len(held)}")
    merged = _merged(held.to(begun.device), begun, place >= 0)
    writable = torch.is_inference_mode_enabled() or not held.is_inference()
    if fixed and merged.shape == held.shape and writable:
        return held.copy_(merged)  # a CUDA graph reads this memory
    kept[layer_type, block] = merged
    return merged


def _merged(held: Tensor, begun: Tensor, begins_now: Tensor) -> Tensor:
    """Rotations of blocks as they were kept, but for those that begin now, [blocks] bool, or were not kept yet."""
    sequences = max(len(held), len(begun))
    held, begun = (side.expand(sequences, -1, -1, -1) for side in (held[:, : begun.shape[1]], begun))
    before = torch.cat([held, begun[:, held.shape[1] :]], dim=1)
    return torch.where(begins_now[:, None, None], begun, before)


def change_beginnings(cache: Cache, change: Callable[[Tensor], Tensor]) -> None:
    """Apply to what a cache keeps a function of tensors [batch_size, ...], which reorders, takes or repeats these."""
    kept: Kept = getattr(cache, BEGINNINGS, {})
    for form, held in kept.items():
        kept[form] = held if len(held) == 1 else change(held)


def _unknown(what: str) -> UsageError:
    return UsageError(
        f"{what}, and this checkpoint stores keys relative to the beginnings of their blocks.",
        "Fill an empty cache by this model, copy it as a whole (copy.deepcopy, torch.save), and take sequences out of "
        "a batch by the cache's own methods (reorder_cache, batch_select_indices).",
    )
