"""What the cache layers of all policies share: transformers' contract, and what attention says to them.

One step of an attention module that knows its cache is

    layer.begin(mask, batch_size, length, device)  # which of the new tokens are padding
    mask = layer.visible(mask, ...)  # of what the layer holds
    key, value = cache.update(key, value, layer_idx)
    ...  # attention
    layer.finish(sums)  # tokens are scored and dropped

A layer's length is the number of tokens it was given, so that masks and positions go by places in the sequence.
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
from ..kernels.parameters import seq_len_of
from ..kernels.rotary import Rotation, rotate
from ..runtime.rope import RotaryTable
from ..runtime.steps import AttentionCall, RowStore, attend_to_rows
from .store import Stored, mapped, tensor_bytes


class StoredSequence(Stored):
    """What a layer stores of one sequence of a batch, without its padding.

    start: the place of its first token, behind padding. tokens: those it was given. new: those of this step.
    """

    start = tokens = new = 0


class PolicyLayer(DynamicLayer, RowStore):
    """One layer of a cache that follows a policy.

    Each sequence of the batch is stored by itself, so that what is stored of it does not depend on the others.

    num_tokens: so far, padding included. length: of the step. table: RoPE of a model that rotates keys before they come
    here, while a step lasts; only for policies that move keys.
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
        """Tokens are about to be stored.

        Args:
            mask: [batch_size or 1, heads or 1, length, tokens], bool (True: attend) or added to the logits; None:
                causal, without padding.
        Raises:
            UsageError: a row has padding that is not on its left.
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
        """Store the new tokens of a sequence, [1, num_heads, new, width]; returns all that attention is to see."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new tokens; returns the keys and values that this step's attention is to see, each sequence's at
        the right end."""
        if not self.begun:
            self.begin(None, len(key_states), key_states.shape[2], key_states.device)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.begun, self.num_tokens = False, self.num_tokens + self.length
        found = []
        for row, sequence in enumerate(self.sequences):
            new = (slice(row, row + 1), slice(None), slice(self.length - sequence.new, None))
            found.append(self.store(sequence, key_states[new], value_states[new]))
        keys, values = (right_aligned(side, 0.0) for side in zip(*found, strict=True))
        return keys, values

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        self.begin(call.mask, len(call.value), seq_len_of(call.query), call.query.device)
        return attend_to_rows(call, *call.cache.update(call.key, call.value, call.layer_idx))

    def observe_weights(self, weights: Tensor | None) -> None:
        """Attention of an uncompressed model is done.

        Args:
            weights: [batch_size, num_heads, length, slots], where the policy needs them.
        """

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        """What a step's hidden states were before this layer's attention was added and after it, [batch_size, length,
        hidden_size] each; only for policies that need them."""

    def follow(self, layout: LayerLayout, dtype: torch.dtype) -> None:
        """Before anything is stored of a compressed model: what its rows are, and the dtype of a number in them."""

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store tokens whose attention is not known, for counting bytes."""
        self.update(key_states, value_states)

    def rotated(self, keys: Tensor, by: Tensor) -> Tensor:
        """Keys of an uncompressed model as RoPE would have them `by` positions later; as they are without a table.

        Args:
            keys: [batch_size, num_heads, tokens, head_dim]. by: broadcastable to [batch_size, num_heads, tokens], below
                0: earlier.
        """
        if self.table is None or not bool(by.any()):
            return keys
        longest = int(by.abs().max()) + 1
        dtype = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = between(self.table(0, longest, longest, keys.device, dtype), by.abs())
        return rotate(keys.to(dtype), cos, sin * by.sign().unsqueeze(-1)).to(keys.dtype)

    @property
    def newest(self) -> Tensor:
        """Which tokens of the step are not padding, [batch_size, length] bool."""
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
        # One that is chosen twice has tensors of its own, as its bytes are counted.
        self.sequences = [mapped(self.sequences[row], Tensor.clone) for row in indices.tolist()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def offload(self) -> None:
        self.sequences = mapped(self.sequences, Tensor.cpu)

    def prefetch(self) -> None:
        if self.is_initialized:
            self.sequences = mapped(self.sequences, lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises UsageError: what was coded together or dropped does not come back."""
        raise UsageError(
            f"crop({tokens_to_remove}): a cache that follows a policy takes no tokens back.",
            "Leave out what takes tokens back (assisted generation), or use --cache none.",
        )


def right_aligned(parts: Sequence[Tensor], value: float) -> Tensor:
    """Tensors [1, ...] of a batch in one, each at the right end of dimension 2, and so much before it."""
    longest, behind = max(part.shape[2] for part in parts), [0, 0] * (parts[0].dim() - 3)
    return torch.cat([functional.pad(part, (*behind, longest - part.shape[2], 0), value=value) for part in parts])


def behind_padding(rows: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, Tensor]:
    """Keys and values [1, num_heads, tokens, width] of a whole sequence as a mask has it, with so much before them."""
    return functional.pad(rows[0], (0, 0, start, 0)), functional.pad(rows[1], (0, 0, start, 0))


def between(table: Rotation, positions: Tensor) -> Rotation:
    """cos and sin of the rotation by so many positions, [*positions, rotary_dim], without RoPE's attention factor."""
    return table[0][positions] / table[0][0], table[1][positions] / table[0][0]


def mask_of_places(mask: Tensor | None, places: Tensor, num_tokens: int, length: int) -> Tensor:
    """The columns of a mask that rows at some places have.

    Args:
        mask: as for `PolicyLayer.begin`.
        places: [batch_size, heads or 1, slots], -1 where there is nothing.
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
    """How many of the newest tokens of each row are no padding: those that the last query sees with some head; a single
    one always."""
    if mask is None or length == 1:
        return [length] * batch_size
    last = mask[:, :, -1, -length:]
    shown = (last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2).any(1)
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()):
        raise _padding_inside()
    found: list[int] = shown.expand(batch_size, -1).sum(-1).tolist()
    return found


def _padding_inside() -> UsageError:
    return UsageError("the attention mask has padding that is not on the left of its row.", "Set padding_side='left'.")
