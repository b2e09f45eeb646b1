"""What the cache layers of all policies share: transformers' contract, and what an attention module says to them.

One forward pass of an attention module that knows its cache is

    layer.begin(mask, batch_size, length, device)  # which of the new tokens are padding
    mask = layer.visible(mask, ...)  # columns of the mask that the layer holds
    key, value = cache.update(key, value, layer_idx)
    ...  # attention; keys before RoPE are rotated by layer.positions
    layer.finish(sums)  # scores are added, tokens dropped

A layer counts the tokens it has seen as its length, so that masks and positions go by their places in the sequence.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..errors import UsageError
from ..format.layout import LayerLayout
from ..kernels.parameters import seq_len_of
from ..runtime.steps import Keeper, Step, attend_to_rows


class PolicyLayer(DynamicLayer, Keeper):
    """One layer of a cache that follows a policy. seen: tokens so far, padding included."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    @abstractmethod
    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        """Tokens are about to be stored.

        Args:
            mask: [batch_size or 1, heads or 1, length, seen + length], bool (True: attend) or added to the logits;
                None: causal, without padding.
        Raises:
            UsageError: a row has padding that is not on its left.
        """

    @property
    def positions(self) -> Tensor | None:
        """Places of what `update` returns, [batch_size, 1 or groups, slots], -1 where there is nothing; None: in order,
        all of them."""
        return None

    def visible(self, mask: Tensor | None, head_groups: Tensor | None, additive: torch.dtype | None) -> Tensor | None:
        """The mask of what `update` is to return.

        Args:
            mask: as for `begin`. head_groups: [num_heads], the group of each query head; None: heads share alike.
            additive: the dtype of a mask that has to be made and is to be added to the logits; None: bool.
        """
        return mask

    def finish(self, sums: Tensor | None) -> None:
        """Attention is done.

        Args:
            sums: [batch_size, groups, slots], how much attention each token drew, softened as the layer asked for; only
                where it did.
        """

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        """What a step's hidden states were before this layer's attention was added and after it, [batch_size, length,
        hidden_size] each; only for policies that need them."""

    def follow(self, layout: LayerLayout, heads_per_kv: int, dtype: torch.dtype) -> None:
        """Before anything is stored of a compressed model: what its rows are, and the dtype of a number in them."""

    def attend(self, step: Step) -> Tensor:
        self.begin(step.mask, len(step.value), seq_len_of(step.query), step.query.device)
        return attend_to_rows(step, *step.cache.update(step.key, step.value, step.layer_idx))

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store tokens whose attention is not known, for counting bytes."""
        self.update(key_states, value_states)

    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes of all tensors that the layer holds."""

    def get_seq_length(self) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def removable(self, tokens_to_remove: int) -> int:
        """How many tokens `crop(tokens_to_remove)` removes; raises UsageError for a positive number."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop({tokens_to_remove}): expected a negative number, of tokens to remove.")
        return min(-tokens_to_remove, self.seen)


def mask_of_places(mask: Tensor | None, places: Tensor, seen: int, length: int, additive: torch.dtype | None) -> Tensor:
    """The columns of a mask that rows at some places have.

    Args:
        mask: [batch_size or 1, heads or 1, length, seen + length], bool (True: attend) or added to the logits; None:
            causal, without padding.
        places: [batch_size, heads or 1, slots], -1 where there is nothing.
        seen: tokens before the step's `length`. additive: the dtype of a mask that has to be made and is to be added
            to the logits; None: bool.
    Returns:
        [batch_size, heads or 1, length, slots].
    """
    there = (places >= 0).unsqueeze(2)
    if mask is None:
        queries = torch.arange(seen, seen + length, device=places.device)
        shown = there & (places.unsqueeze(2) <= queries[:, None])
        if additive is None:
            return shown
        least = torch.finfo(additive).min
        return torch.zeros(shown.shape, dtype=additive, device=shown.device).masked_fill(~shown, least)
    heads = max(mask.shape[1], places.shape[1])
    index = places.clamp(min=0).long().unsqueeze(2).expand(-1, heads, length, -1)
    columns = mask.expand(len(places), heads, length, -1).gather(-1, index)
    return columns.masked_fill(~there, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


def seen_by_last(mask: Tensor, batch_size: int) -> Tensor:
    """Which keys the last query sees with some head, [batch_size, kv_len] bool: all but padding."""
    last = mask[:, :, -1]
    shown = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
    return shown.any(1).expand(batch_size, -1)


def left_padding(mask: Tensor, batch_size: int) -> Tensor:
    """Tokens of padding on the left of each row, [batch_size].

    Raises:
        UsageError: what the last query does not see is not on the left.
    """
    shown = seen_by_last(mask, batch_size)
    check_left(shown)
    return shown.shape[1] - shown.sum(-1)


def check_left(shown: Tensor) -> None:
    """Raises UsageError where of [batch_size, tokens] bool a false one comes behind a true one."""
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()):
        raise UsageError(
            "the attention mask has padding that is not on the left of its row.", "Set padding_side='left'."
        )
