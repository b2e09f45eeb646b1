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

    from .rope import TokenSpan

BEGINNINGS = "rotor_beginnings"
"""Attribute of a cache: by the type of layers that RoPE tells apart, cos and sin of the beginning of each block,
[batch_size or 1, blocks, 2, planes]. It lies on the cache itself, as nothing else is copied, pickled and dropped with
it."""


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
    planes = given[0].shape[-1] // 2
    new = torch.stack([side[..., :planes] for side in given], dim=2)
    count = -(-(span.kv_offset + span.kv_len) // block)
    place = torch.arange(count, device=new.device) * block - span.query_offset  # of beginnings among the new tokens
    begun = new[:, place.clamp(0, span.seq_len - 1)]
    if cache is None:
        return begun
    kept: dict[str | None, Tensor] = getattr(cache, BEGINNINGS, {})
    held = kept.get(layer_type)
    if held is None:
        if isinstance(span.query_offset, int) and span.query_offset:
            raise _unknown(f"the cache holds {span.query_offset} tokens whose rotations are unknown")
        setattr(cache, BEGINNINGS, kept | {layer_type: begun})
        return begun
    if len(held) != len(begun) and 1 not in (len(held), len(begun)):
        raise _unknown(f"{len(begun)} sequences, and the cache holds the rotations of {len(held)}")
    sequences = max(len(held), len(begun))
    held, begun = held[:, :count].to(begun.device).expand(sequences, -1, -1, -1), begun.expand(sequences, -1, -1, -1)
    begins_now = (place >= 0)[:, None, None]
    found = torch.where(begins_now, begun, torch.cat([held, begun[:, held.shape[1] :]], dim=1))
    if torch.compiler.is_compiling() and found.shape == kept[layer_type].shape:
        return kept[layer_type].copy_(found)  # compiled code writes to the same memory each time
    kept[layer_type] = found
    return found


def change_beginnings(cache: Cache, change: Callable[[Tensor], Tensor]) -> None:
    """Apply to what a cache keeps a function of tensors [batch_size, ...], which reorders, takes or repeats these."""
    kept: dict[str | None, Tensor] = getattr(cache, BEGINNINGS, {})
    for layer_type, held in kept.items():
        kept[layer_type] = held if len(held) == 1 else change(held)


def _unknown(what: str) -> UsageError:
    return UsageError(
        f"{what}, and this checkpoint stores keys relative to the beginnings of their blocks.",
        "Fill an empty cache by this model, copy it as a whole (copy.deepcopy, torch.save), and take sequences out of "
        "a batch by the cache's own methods (reorder_cache, batch_select_indices).",
    )
