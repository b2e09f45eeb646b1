"""One forward pass over several processes: who has which tokens, and what the model is given of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..errors import UsageError
from .cache import Seen, Share, SpreadLayer, seen_of, spread_layers
from .plan import pieces
from .wire import Wire

POSITIONS_FROM_MASK = frozenset({"opt"})
"""Families that count positions by the attention mask where they are given none."""


@dataclass
class Pass:
    """A forward pass.

    first, length: index of its first token in the whole sequence, and the tokens of that up to its last.
    runs: the tokens of each process; None where every process has all tokens of the pass. owner: then, the process that
        stores their rows.
    owned: indices of each process's tokens, where there are runs. indices: of this process's. share: what it stores.
    attended: of every index whether it is no padding, [batch_size, length]; None: all are not.
    positions: of the tokens of the pass, [batch_size or 1, tokens]; own_positions: of this process's.
    seen: of the cache, None without one. tokens_to_keep: of which logits are wanted; 0 for all.
    """

    first: int
    length: int
    runs: list[list[range]] | None
    owner: int
    owned: list[Tensor]
    indices: Tensor
    share: Share
    attended: Tensor | None
    positions: Tensor
    own_positions: Tensor
    seen: Seen | None
    tokens_to_keep: int

    def count_stored(self) -> None:
        """At the end of the pass: add its tokens to what the cache knows of its processes."""
        if self.seen is None:
            return
        if self.runs is None:
            self.seen.counts[self.owner] += self.length - self.first
            return
        for process, indices in enumerate(self.owned):
            self.seen.counts[process] += len(indices)


def begin_pass(
    arguments: dict[str, Any], config: Any, wire: Wire, windows: list[int | None], before_rope: bool
) -> tuple[Pass, dict[str, Any]]:
    """Share out a forward pass.

    Args:
        arguments: of the model's forward, the same in every process. config: the model's.
        windows: of its layers. before_rope: whether it keeps keys before RoPE, rotated by their indices.
    Returns:
        The pass, and the arguments for this process.
    Raises:
        UsageError: see `sequence_parallel`.
    """
    name = "input_ids" if arguments.get("input_ids") is not None else "inputs_embeds"
    inputs = arguments.get(name)
    if inputs is None:
        raise UsageError("the model was called without input_ids.", "Give input_ids or inputs_embeds.")
    if arguments.get("labels") is not None:
        raise UsageError(
            "labels: a process has the logits of its own tokens only.",
            "Compute the loss from the logits, with `own(labels)` of what sequence_parallel() gives.",
        )
    keep = arguments.get("logits_to_keep") or 0
    if not isinstance(keep, int):
        raise UsageError("logits_to_keep: expected a number of tokens.", "Give 1 for the last token, 0 for all.")
    cache, seen = _spread_cache(arguments, config, windows, wire.count)
    first = 0 if seen is None else seen.tokens
    tokens = inputs.shape[1]
    mask = _check_mask(arguments.get("attention_mask"), inputs, first + tokens)
    _agree(wire, inputs, mask, first)
    attended = None if mask is None or bool(mask.all()) else mask
    positions = arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(first, first + tokens, device=inputs.device)[None]
        if config.model_type in POSITIONS_FROM_MASK and attended is not None:
            positions = (attended.long().cumsum(1) * attended - 1)[:, first:]
    if before_rope:
        _check_shifts(positions, first, attended, seen)
    runs, owned, owner = None, [], 0
    if first == 0 and tokens >= 2 * wire.count:
        runs = pieces(tokens, wire.count)
        owned = [torch.tensor([*head, *tail], device=inputs.device) for head, tail in runs]
        own = owned[wire.rank]
        share = Share(own, stored=True)
    else:
        own = torch.arange(tokens, device=inputs.device)
        owner = 0 if seen is None else seen.counts.index(min(seen.counts))
        share = Share(first + own, stored=owner == wire.rank)
    now = Pass(
        first,
        first + tokens,
        runs,
        owner,
        owned,
        first + own,
        share,
        attended,
        positions,
        positions.index_select(1, own),
        seen,
        keep,
    )
    changed = arguments | {
        name: inputs.index_select(1, own),
        "position_ids": now.own_positions,
        # One of four dimensions goes through every family's masking as it is; attention makes its own.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device),
        "past_key_values": cache,
    }
    for along in ("token_type_ids", "cache_position"):
        if changed.get(along) is not None:
            changed[along] = changed[along].index_select(-1, own)
    return now, changed


def _spread_cache(
    arguments: dict[str, Any], config: Any, windows: list[int | None], processes: int
) -> tuple[Any, Seen | None]:
    """The cache of the pass, its layers made to be spread if it is new, and what is known of it."""
    cache, use_cache = arguments.get("past_key_values"), arguments.get("use_cache")
    if cache is None:
        if not (config.use_cache if use_cache is None else use_cache):
            return None, None
        cache = DynamicCache()
    if not isinstance(cache, DynamicCache):
        raise UsageError(
            f"a {type(cache).__name__} cannot be spread over processes.",
            "Leave past_key_values and cache_implementation out, or give a DynamicCache.",
        )
    if not (cache.layers and isinstance(cache.layers[0], SpreadLayer)):
        if cache.get_seq_length() or getattr(cache, "offloading", False):
            raise UsageError(
                "a cache that is offloaded, or was filled outside of sequence_parallel(), cannot be spread.",
                "Begin with an empty DynamicCache inside of it.",
            )
        cache.layers[:] = spread_layers(windows, processes)
    return cache, seen_of(cache)


def _check_mask(mask: Any, inputs: Tensor, length: int) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != (inputs.shape[0], length):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(
            f"attention_mask: got {got}, expected [{inputs.shape[0]}, {length}] (batch_size, tokens so far).",
            "Other masks than that of padding cannot be spread over processes.",
        )
    return mask.bool()


def _agree(wire: Wire, inputs: Tensor, mask: Tensor | None, first: int) -> None:
    """Raises UsageError in all processes where they were given different inputs: they would wait for each other."""
    numbers = inputs.double() if inputs.is_floating_point() else inputs.long()
    weights = torch.arange(1, numbers.numel() + 1, device=inputs.device).view(numbers.shape)
    total = (numbers * weights).sum().view(1).view(torch.int64)
    padding = (
        0
        if mask is None
        else int((mask * torch.arange(1, mask.numel() + 1, device=mask.device).view(mask.shape)).sum())
    )
    own = torch.tensor([*inputs.shape[:2], first, padding], device=inputs.device)
    own = torch.cat([own, total])
    found = wire.gather("comparing the inputs", "agreement", own, [tuple(own.shape)] * wire.count)
    for process, other in enumerate(found):
        if not torch.equal(other, found[0]):
            raise UsageError(
                f"process {process} was given {_describe(other)}, process 0 {_describe(found[0])}: expected the same "
                "token ids and the same mask in every process.",
                "Give every process the whole prompt; when sampling, set the same seed in all of them.",
            )


def _describe(numbers: Tensor) -> str:
    batch_size, tokens, first, padding, total = numbers.tolist()
    return f"{batch_size} x {tokens} tokens from index {first} (sums {padding}, {total})"


def _check_shifts(positions: Tensor, first: int, attended: Tensor | None, seen: Seen | None) -> None:
    """Raises UsageError where positions skip or repeat within a sequence: keys before RoPE are rotated by indices.

    Only differences count, so that a sequence may be shifted by its padding.
    """
    tokens = positions.shape[1]
    shifts = positions - torch.arange(first, first + tokens, device=positions.device)
    batch_size = len(shifts) if attended is None else len(attended)
    shifts = shifts.expand(batch_size, -1)
    counted = torch.ones_like(shifts, dtype=torch.bool) if attended is None else attended[:, first:]
    if seen is not None and seen.shifts is not None and len(seen.shifts) == batch_size:
        known = seen.shifts[:, None]
        shifts, counted = torch.cat([known, shifts], 1), torch.cat([known != UNKNOWN, counted], 1)
    large = torch.iinfo(torch.int64).max
    least = shifts.masked_fill(~counted, large).amin(1)
    most = shifts.masked_fill(~counted, -large).amax(1)
    wrong = counted.any(1) & (least != most)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise UsageError(
            f"row {row}: position_ids skip or repeat between tokens of one sequence, and this checkpoint stores keys "
            "before RoPE, which it rotates by their place in the cache.",
            "Leave no holes inside a row (pad on the left), or use a checkpoint with keys compressed after RoPE (rotor "
            "calibrate --set groups.domain=post).",
        )
    if seen is not None:
        seen.shifts = torch.where(counted.any(1), least, UNKNOWN)


UNKNOWN = torch.iinfo(torch.int64).min
"""The shift of a sequence of which nothing but padding was seen."""
