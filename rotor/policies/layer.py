"""The cache layer that all policies build on: transformers' interface, and what attention tells it.

In a step, an attention module that knows its cache calls

    layer.begin(mask, batch_size, length, device)  # which of the new tokens are padding
    mask = layer.visible(mask, ...)  # the columns of the tokens that the layer holds
    key, value = cache.update(key, value, layer_idx)
    ...  # attention
    layer.finish(sums)  # tokens are scored and dropped

A layer's length is the number of tokens it was given, so masks and positions refer to the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from ..checkpoint.layout import LayerLayout
from ..errors import UsageError
from ..kernels.parameters import seq_len_of, shown_by
from ..kernels.rotary import Rotation, rotate
from ..runtime.rope import RotaryTable
from ..runtime.steps import AttentionCall, RowStore, attend_to_rows
from .store import Stored, mapped, tensor_bytes


class StoredSequence(Stored):
    """Store of a layer for one sequence of a batch, without its padding.

    start: position of the first token, behind padding. tokens: tokens given so far. new: tokens of this step.
    """

    start = tokens = new = 0


class PolicyLayer(DynamicLayer, RowStore):
    """One layer of a cache that follows a policy.

    Each sequence of a batch is stored by itself, independently of the others.

    num_tokens: tokens so far, with padding. length: tokens of the step. table: RoPE of a model that rotates keys before
    they come here, for the length of a step; only for policies that move keys.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False
    new_sequence: Callable[[], Any]
    sequences: list[Any]
    table: RotaryTable | None = None
    num_tokens: int
    length: int

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        """Prepare for the tokens of a step, which are about to be stored.

        Args:
            mask: [batch_size or 1, heads or 1, length, tokens], bool (True: attend) or added to the logits; None:
                causal, without padding.
        Raises:
            UsageError: a sequence has padding that is not on its left.
        """
        self.length, self.begun = length, True
        self.sequences = self.sequences or [type(self).new_sequence() for _ in range(batch_size)]
        for sequence, new in zip(self.sequences, real_tokens(mask, batch_size, length), strict=True):
            if sequence.tokens and new < length:
                raise _padding_inside()
            if not sequence.tokens:
                sequence.start = self.num_tokens + length - new
            sequence.new, sequence.tokens = new, sequence.tokens + new

    def visible(self, mask: Tensor | None, head_groups: Tensor) -> Tensor | None:
        """The mask of what `update` is to return.

        Args:
            mask: as for `begin`. head_groups: [num_heads], the group of each query head.
        """
        return mask

    def store(self, sequence: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of a sequence, [1, num_heads, new, width]; returns the keys and values to attend to."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns the keys and values that this step attends to, right-aligned by sequence."""
        if not self.begun:
            self.begin(None, len(key_states), key_states.shape[2], key_states.device)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.begun, self.num_tokens = False, self.num_tokens + self.length
        seen = []
        for row, sequence in enumerate(self.sequences):
            new = (slice(row, row + 1), slice(None), slice(self.length - sequence.new, None))
            seen.append(self.store(sequence, key_states[new], value_states[new]))
        keys, values = (right_aligned(side, 0.0) for side in zip(*seen, strict=True))
        return keys, values

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        self.begin(call.mask, len(call.value), seq_len_of(call.query), call.query.device)
        return attend_to_rows(call, *call.cached())

    def observe_weights(self, weights: Tensor | None) -> None:
        """Take note of the attention weights of an uncompressed model, once attention is done.

        Args:
            weights: [batch_size, num_heads, length, slots], where the policy needs them.
        """

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        """Take note of a step's hidden states before and after this layer's attention was added, [batch_size, length,
        hidden_size] each; only for policies that need them."""

    def follow(self, layout: LayerLayout, dtype: torch.dtype) -> None:
        """Take note of a compressed model's rows and dtype, before anything is stored."""

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store tokens of unknown attention, for counting bytes."""
        self.update(key_states, value_states)

    def rotated(self, keys: Tensor, by: Tensor) -> Tensor:
        """Rotate keys of an uncompressed model as RoPE would `by` positions later; without a table they stay.

        Args:
            keys: [batch_size, num_heads, tokens, head_dim]. by: broadcastable to [batch_size, num_heads, tokens];
                negative: earlier.
        """
        if self.table is None or not bool(by.any()):
            return keys
        longest = int(by.abs().max()) + 1
        dtype = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = between(self.table(longest, keys.device, dtype), by.abs())
        return rotate(keys.to(dtype), cos, sin * by.sign().unsqueeze(-1)).to(keys.dtype)

    @property
    def newest(self) -> Tensor:
        """Mask of the step's tokens that are not padding, [batch_size, length] bool."""
        new = torch.tensor([sequence.new for sequence in self.sequences], device=self.device)
        return torch.arange(self.length, device=self.device) >= self.length - new[:, None]

    def stored_bytes(self) -> int:
        """Bytes of all tensors that the layer holds."""
        return tensor_bytes(self.sequences)

    def get_seq_length(self) -> int:
        return self.num_tokens

    def reset(self) -> None:
        self.sequences, self.begun = [], False
        self.num_tokens, self.is_initialized = 0, False

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        # A sequence that is chosen twice gets a copy, as bytes are counted by tensor.
        self.sequences = [mapped(self.sequences[row], Tensor.clone) for row in indices.tolist()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def offload(self) -> None:
        self.sequences = mapped(self.sequences, Tensor.cpu)

    def prefetch(self) -> None:
        if self.is_initialized:
            self.sequences = mapped(self.sequences, lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise UsageError: tokens that were coded together or dropped cannot be taken back."""
        raise UsageError(
            f"crop({tokens_to_remove}): a cache that follows a policy takes no tokens back.",
            "Leave out what takes tokens back (assisted generation), or use --cache none.",
        )


def right_aligned(parts: Sequence[Tensor], value: float) -> Tensor:
    """Stack tensors [1, ...] of a batch, right-aligned in dimension 2 and filled with `value` on the left."""
    longest, behind = max(part.shape[2] for part in parts), [0, 0] * (parts[0].dim() - 3)
    return torch.cat([functional.pad(part, (*behind, longest - part.shape[2], 0), value=value) for part in parts])


def behind_padding(rows: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, Tensor]:
    """Keys and values [1, num_heads, tokens, width] of a whole sequence with `start` rows of padding before them."""
    return functional.pad(rows[0], (0, 0, start, 0)), functional.pad(rows[1], (0, 0, start, 0))


def between(table: Rotation, positions: Tensor) -> Rotation:
    """cos and sin of a rotation by `positions`, [*positions, rotary_dim], without RoPE's attention factor."""
    return table[0][positions] / table[0][0], table[1][positions] / table[0][0]


def mask_of_places(mask: Tensor | None, places: Tensor, num_tokens: int, length: int) -> Tensor:
    """Gather the columns of a mask that belong to tokens at some positions.

    Args:
        mask: as for `PolicyLayer.begin`.
        places: positions, [batch_size, heads or 1, slots]; -1 for an empty slot.
        num_tokens: tokens before the step's `length`.
    Returns:
        [batch_size, heads or 1, length, slots].
    """
    there = (places >= 0).unsqueeze(2)
    if mask is None:
        queries = torch.arange(num_tokens, num_tokens + length, device=places.device)
        return there & (places.unsqueeze(2) <= queries[:, None])
    heads = max(mask.shape[1], places.shape[1])
    index = places.clamp(min=0).long().unsqueeze(2).expand(-1, heads, length, -1)
    columns = mask.expand(len(places), heads, length, -1).gather(-1, index)
    return columns.masked_fill(~there, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


def real_tokens(mask: Tensor | None, batch_size: int, length: int) -> list[int]:
    """Number of the newest tokens of each sequence that are not padding: the last query sees them with some head. A
    single token always counts."""
    if mask is None or length == 1:
        return [length] * batch_size
    last = mask[:, :, -1, -length:]
    shown = shown_by(last).any(1)
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()):
        raise _padding_inside()
    counts: list[int] = shown.expand(batch_size, -1).sum(-1).tolist()
    return counts


def _padding_inside() -> UsageError:
    return UsageError("the attention mask has padding that is not on the left of its row.", "Set padding_side='left'.")
