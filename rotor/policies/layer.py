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

from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..errors import UsageError
from ..format.layout import LayerLayout
from ..kernels.parameters import seq_len_of
from ..kernels.rotary import Rotation, rotate
from ..runtime.rope import RotaryTable
from ..runtime.steps import Keeper, Step, attend_to_rows
from .store import Side, tensor_bytes

NOISE_BLOCK = 1024
"""Tokens whose random numbers are drawn together."""


class PolicyLayer(DynamicLayer, Keeper):
    """One layer of a cache that follows a policy.

    num_tokens: so far, padding included. stored: names of the attributes whose tensors are the cache, batch first;
    beside: of further tensors, batch first, that are too small to count. table: RoPE of a model that rotates keys
    before they come here, while a step lasts; only for policies that turn keys.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False
    stored: ClassVar[tuple[str, ...]]
    beside: ClassVar[tuple[str, ...]] = ()
    table: RotaryTable | None = None

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0

    @abstractmethod
    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        """Tokens are about to be stored.

        Args:
            mask: [batch_size or 1, heads or 1, length, tokens], bool (True: attend) or added to the logits; None:
                causal, without padding.
        Raises:
            UsageError: a row has padding that is not on its left.
        """

    def visible(self, mask: Tensor | None, head_groups: Tensor) -> Tensor | None:
        """The mask of what `update` is to return.

        Args:
            mask: as for `begin`. head_groups: [num_heads], the group of each query head.
        """
        return mask

    def attend(self, step: Step) -> Tensor:
        self.begin(step.mask, len(step.value), seq_len_of(step.query), step.query.device)
        return attend_to_rows(step, *step.cache.update(step.key, step.value, step.layer_idx))

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

    def turned(self, keys: Tensor, by: Tensor) -> Tensor:
        """Keys of an uncompressed model as RoPE would have them `by` positions later; as they are without a table.

        Args:
            keys: [batch_size, num_heads, tokens, head_dim]. by: [batch_size, 1 or num_heads, tokens], below 0: earlier.
        """
        if self.table is None or not bool(by.any()):
            return keys
        longest = int(by.abs().max()) + 1
        dtype = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = between(self.table(0, longest, longest, keys.device, dtype), by.abs())
        return rotate(keys.to(dtype), cos, sin * by.sign().unsqueeze(-1)).to(keys.dtype)

    def stored_bytes(self) -> int:
        """Bytes of all tensors that the layer holds."""
        return tensor_bytes([getattr(self, name) for name in self.stored])

    def get_seq_length(self) -> int:
        return self.num_tokens

    def reset(self) -> None:
        for name in (*self.stored, *self.beside):
            setattr(self, name, None)
        self.num_tokens, self.is_initialized = 0, False

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda tensor: tensor[indices.to(tensor.device)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def offload(self) -> None:
        self.map(Tensor.cpu, self.stored)  # not in the background: what is dropped is chosen among the rows at once

    def prefetch(self) -> None:
        if self.is_initialized:
            self.map(lambda tensor: tensor.to(self.device, non_blocking=True), self.stored)

    def map(self, function: Callable[[Tensor], Tensor], names: tuple[str, ...] | None = None) -> None:
        """Replace each tensor."""
        for name in names or (*self.stored, *self.beside):
            setattr(self, name, _mapped(getattr(self, name), function))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises UsageError: what was coded together or dropped does not come back."""
        raise UsageError(
            f"crop({tokens_to_remove}): a cache that follows a policy takes no tokens back.",
            "Leave out what takes tokens back (assisted generation), or use --cache none.",
        )


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, Side):
        return value.map(function)
    return function(value) if isinstance(value, Tensor) else value


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


def real_tokens(mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> Tensor:
    """Which of the newest tokens are not padding, [batch_size, length] bool: those that the last query sees with some
    head; a single one always. Raises UsageError where there is padding behind a token."""
    if mask is None or length == 1:
        return torch.ones(batch_size, length, dtype=torch.bool, device=device)
    last = mask[:, :, -1, -length:]
    shown = (last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2).any(1)
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()):
        raise UsageError(
            "the attention mask has padding that is not on the left of its row.", "Set padding_side='left'."
        )
    return shown.expand(batch_size, -1)


def noise_of(index: Tensor, seed: int, layer: int) -> Tensor:
    """Numbers from (0, 1), for tokens at the places `index` of their rows, [batch_size, groups, slots]; of negative
    ones any."""
    count = max(0, int(index.max())) // NOISE_BLOCK + 1
    table = torch.cat([_block(seed, layer, block, index.shape[1]) for block in range(count)], dim=1).to(index.device)
    return table.expand(len(index), -1, -1).gather(-1, index.clamp(min=0).long())


@lru_cache(maxsize=1024)
def _block(seed: int, layer: int, block: int, groups: int) -> Tensor:
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + layer) * 1_000_003 + block) % 2**63)
    return torch.rand(groups, NOISE_BLOCK, generator=generator).clamp(1e-6, 1 - 1e-6)
