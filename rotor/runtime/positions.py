"""Check that the positions given to a model agree with indices in the cache, as far as attention can tell.

Keys that are stored before RoPE are rotated by their index in the cache, unless they are rotated as given
(`rope.BlocksAsGiven`). Only differences of positions matter: padding on the left shifts a whole sequence. If tokens
that are attended to have different shifts (a hole inside a sequence whose positions skip it; several documents in a
row), the result would be wrong and nothing would say so.

Where rotations do not follow from places in the cache, it keeps the rotation of each block's first token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UsageError
from ..kernels.parameters import shown_by
from ..kernels.rotary import Rotation

if TYPE_CHECKING:
    from transformers import Cache

    from ..kernels.passes import TokenSpan

SHIFTS = "rotor_shifts"
"""Attribute of a cache that a model with keys before RoPE has filled: position less index of its tokens,
[batch_size, n]; tokens behind these have the last one's. It lies on the cache itself, as nothing else is copied,
pickled and dropped with it."""


def keep_shifts_with_rows(cache_class: type[Cache]) -> None:
    """Let what reorders, takes or repeats the sequences of a transformers cache do so with their shifts, and with the
    rotations of their blocks."""

    def follow(name: str, change: Callable[..., Tensor]) -> None:
        method = getattr(cache_class, name)

        @wraps(method)
        def changing(cache: Cache | None, *given: object, **named: object) -> object:
            result = method(cache, *given, **named)
            shifts = getattr(cache, SHIFTS, None)
            if shifts is not None:
                setattr(cache, SHIFTS, change(shifts, *given, *named.values()))
            if cache is not None:
                change_beginnings(cache, lambda held: change(held, *given, *named.values()))
            return result

        setattr(cache_class, name, changing)

    for name in ("reorder_cache", "batch_select_indices"):
        follow(name, lambda shifts, rows: shifts[torch.as_tensor(rows).to(shifts.device)])
    follow("batch_repeat_interleave", lambda shifts, repeats: shifts.repeat_interleave(repeats, 0))


def check_positions(
    positions: Tensor,
    mask: Tensor | None,
    cache: Cache | None,
    batch_size: int,
    query_offset: int | Tensor,
    kv_offset: int | Tensor,
) -> None:
    """Compare the positions of a pass with cache indices.

    Steps of one token on a GPU are left out, since reading the result would make the host wait.

    Args:
        positions: [batch_size or 1, seq_len].
        mask: [batch_size or 1, 1 or num_heads, seq_len, kv_len], boolean (True: attend) or additive; None: causal.
        cache: the cache that keys go into, or None. query_offset: index there of the first query.
        kv_offset: index of the first key that the mask has.
    Raises:
        UsageError: keys are attended to whose distance in the cache is not that of their positions; or the cache holds
            tokens of unknown positions.
    """
    seq_len, compares = positions.shape[-1], not positions.is_cuda or positions.shape[-1] > 1
    if not compares and (hasattr(cache, SHIFTS) or torch.cuda.is_current_stream_capturing()):
        return
    start = int(query_offset)
    index = torch.arange(start, start + seq_len, device=positions.device)
    new = (positions - index).expand(batch_size, -1)
    shifts = torch.cat([_known(cache, start, batch_size).to(new.device), new], dim=1) if start else new
    alike = not compares or bool((shifts == shifts[:, :1]).all())
    if cache is not None:
        setattr(cache, SHIFTS, shifts[:, :1].clone() if alike else shifts)
    if not alike:
        _compare(shifts[:, int(kv_offset) :], mask, int(kv_offset))


def _known(cache: Cache | None, start: int, batch_size: int) -> Tensor:
    """The shifts of all tokens in a cache, [batch_size, start]."""
    known: Tensor | None = getattr(cache, SHIFTS, None)
    if known is not None and bool((known == known[:1]).all()):
        known = known[:1].expand(batch_size, -1)  # no matter which sequences were taken
    elif known is not None and batch_size % len(known) == 0:
        known = known.repeat_interleave(batch_size // len(known), 0)
    if known is None or len(known) != batch_size or not known.shape[1]:
        raise UsageError(
            f"the cache holds {start} tokens whose positions are unknown, and this checkpoint stores keys before RoPE, "
            "which it rotates by their place in the cache.",
            "Fill an empty cache by this model, copy it as a whole (copy.deepcopy, torch.save), and take sequences out "
            "of a batch with padding by the cache's own methods (reorder_cache, batch_select_indices).",
        )
    known = known[:, :start]
    return torch.cat([known, known[:, -1:].expand(-1, start - known.shape[1])], dim=1)


def _compare(shifts: Tensor, mask: Tensor | None, first: int) -> None:
    """Check that the keys which some query sees have one shift, [batch_size, keys] from index `first` on; raises
    UsageError if not."""
    attended = torch.ones_like(shifts, dtype=torch.bool)
    if mask is not None:
        attended &= shown_by(mask)[..., : shifts.shape[1]].any(1).any(1)
    last = attended.long().cumsum(-1).argmax(-1, keepdim=True)
    wrong = attended & (shifts != shifts.gather(1, last))
    if bool(wrong.any()):
        sequence, key = wrong.nonzero()[0].tolist()
        newest = int(last[sequence])
        raise UsageError(
            f"sequence {sequence}: the tokens at {first + key} and {first + newest} of the cache are {newest - key} "
            "apart there, but not by position_ids, and this checkpoint stores keys before RoPE, which it rotates by "
            "their place in the cache.",
            "Pad on the left (tokenizer.padding_side = 'left'), leave no other holes inside a sequence, give one "
            "document in a row, or use a checkpoint with keys compressed after RoPE (rotor calibrate --set "
            "groups.domain=post).",
        )


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
