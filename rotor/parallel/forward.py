"""One forward pass over several processes: how tokens are divided, and what each process's model is given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..errors import UsageError
from ..runtime.positions import check_positions
from .attention import visible
from .cache import ShardedLayer
from .launch import own_indices
from .wire import Wire

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..runtime.steps import Arguments

POSITIONS_FROM_MASK = frozenset({"opt"})
"""Families that count positions by the attention mask if they are given none."""


@dataclass
class Pass:
    """A forward pass.

    first, length: index of its first token in the whole sequence, and tokens of the sequence up to its last.
    sharded: each process has some of the tokens; otherwise every process has all of them.
    indices: of the tokens that this process has. stored: indices of the tokens whose rows each process stores.
    attended: whether each index holds a token rather than padding, [batch_size, length]; None: all do.
    counts: tokens of the cache that each process has; None without a cache. tokens_to_keep: last tokens whose logits
        are wanted; 0 for all.
    """

    first: int
    length: int
    sharded: bool
    indices: Tensor
    stored: list[Tensor]
    attended: Tensor | None
    counts: list[int] | None
    tokens_to_keep: int


def begin_pass(
    arguments: Arguments, config: PreTrainedConfig, wire: Wire, windows: list[int | None], before_rope: bool
) -> tuple[Pass, Arguments]:
    """Share out a forward pass.

    Args:
        arguments: of the model's forward, the same in every process. config: the model's.
        windows: of the layers. before_rope: the model keeps keys before RoPE, rotated by their indices.
    Returns:
        The pass, and the arguments for this process.
    Raises:
        UsageError: see `sequence_parallel`.
    """
    name = "input_ids" if arguments.get("input_ids") is not None else "inputs_embeds"
    inputs = arguments[name]
    keep = arguments.get("logits_to_keep") or 0
    if not isinstance(keep, int):
        raise UsageError("logits_to_keep: expected a number of tokens.", "Give 1 for the last token, 0 for all.")
    cache = _sharded_cache(arguments, config, windows, wire.count)
    counts = None if cache is None else cache.layers[0].counts
    first, tokens = sum(counts or ()), inputs.shape[1]
    mask = _check_mask(arguments.get("attention_mask"), inputs, first + tokens)
    _agree(wire, inputs, mask, first)
    attended = None if mask is None or bool(mask.all()) else mask
    positions = arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(first, first + tokens, device=inputs.device)[None]
        if config.model_type in POSITIONS_FROM_MASK and attended is not None:
            positions = (attended.long().cumsum(1) * attended - 1)[:, first:]
    if before_rope:
        every = torch.arange(first + tokens, device=inputs.device)
        whole = None if attended is None else visible(every[first:], every, attended, None)
        check_positions(positions, whole, cache, len(inputs), first, 0)
    sharded = first == 0 and tokens >= 2 * wire.count
    if sharded:
        stored = own_indices(tokens, wire.count, inputs.device)
        here = stored[wire.rank]
    else:
        here = torch.arange(tokens, device=inputs.device)
        fewest = counts.index(min(counts)) if counts else 0
        stored = [first + here if process == fewest else here[:0] for process in range(wire.count)]
    now = Pass(first, first + tokens, sharded, first + here, stored, attended, counts, keep)
    changed = arguments | {
        name: inputs.index_select(1, here),
        "position_ids": positions.index_select(1, here),
        # A mask of four dimensions passes every family's masking unchanged; attention makes its own.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device),
        "past_key_values": cache,
    }
    for along in ("token_type_ids", "cache_position"):
        if changed.get(along) is not None:
            changed[along] = changed[along].index_select(-1, here)
    return now, changed


def _sharded_cache(arguments: Arguments, config: PreTrainedConfig, windows: list[int | None], processes: int) -> Any:
    """The cache of the pass, with layers for splitting if it is new; None if there is no cache."""
    cache, use_cache = arguments.get("past_key_values"), arguments.get("use_cache")
    if cache is None:
        if not (config.use_cache if use_cache is None else use_cache):
            return None
        cache = DynamicCache()
    if not isinstance(cache, DynamicCache):
        raise UsageError(
            f"a {type(cache).__name__} cannot be split over processes.",
            "Leave past_key_values and cache_implementation out, or give a DynamicCache.",
        )
    if not (cache.layers and isinstance(cache.layers[0], ShardedLayer)):
        if cache.get_seq_length() or getattr(cache, "offloading", False):
            raise UsageError(
                "a cache that is offloaded, or was filled outside of sequence_parallel(), cannot be split.",
                "Begin with an empty DynamicCache inside of it.",
            )
        counts = [0] * processes
        cache.layers[:] = [ShardedLayer(counts, window) for window in windows]
    return cache


def _check_mask(mask: object, inputs: Tensor, length: int) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != (inputs.shape[0], length):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UsageError(
            f"attention_mask: got {got}, expected [{inputs.shape[0]}, {length}] (batch_size, tokens so far).",
            "Other masks than that of padding cannot be split over processes.",
        )
    return mask.bool()


def _agree(wire: Wire, inputs: Tensor, mask: Tensor | None, first: int) -> None:
    """Check that all processes were given the same inputs, else they would wait for each other; raises UsageError."""
    digest = hashlib.sha256()
    for tensor in (inputs, mask):
        if tensor is not None:
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    number = int.from_bytes(digest.digest()[:8], "little", signed=True)
    agreed = torch.tensor([*inputs.shape[:2], first, number], device=inputs.device)
    gathered = wire.gather("comparing the inputs", "agreement", [agreed], [[tuple(agreed.shape)]] * wire.count)
    for process, (other,) in enumerate(gathered):
        if not torch.equal(other, gathered[0][0]):
            (batch_size, tokens, index, _), of_first = other.tolist(), gathered[0][0].tolist()
            raise UsageError(
                f"process {process} was given {batch_size} x {tokens} tokens from index {index}, process 0 "
                f"{of_first[0]} x {of_first[1]} from {of_first[2]}, or others: expected the same token ids and the "
                "same mask in every process.",
                "Give every process the whole prompt; when sampling, set the same seed in all of them.",
            )
