"""The cache layer that keeps important tokens with more channels than others: two blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..format.layout import LayerLayout
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..kernels.reference import join, partial_attention
from ..kernels.rotary import Rotation
from ..runtime.rope import rows_of
from ..runtime.steps import Step
from .codec import tensor_bytes
from .layer import PolicyLayer, mask_of_places
from .tier_index import HIGH, LOW, TierIndex
from .tier_rows import TierRows, tier_rows

if TYPE_CHECKING:
    from .tiers import Tiers


@dataclass(frozen=True)
class Block:
    """Rows of one tier as a step's attention sees them.

    rows: what of the layer's latents they hold. key, value: [batch_size, 1, slots, width]. places: in the sequence,
    [batch_size, slots] int64, -1 where a slot is empty; None: all tokens in order.
    """

    rows: TierRows
    key: Tensor
    value: Tensor
    places: Tensor | None


class TieredLayer(PolicyLayer):
    """One layer's cache in two blocks: rows of important tokens, and rows of others, with fewer channels.

    A layer that chooses (its index is its own) cuts rows after a step's attention, whose denominators it goes by; one
    that repeats another's choice cuts them before its own attention.

    Args:
        index: shared with the layer that chooses, which comes first.
        chooses: whether this layer does.

    keys, values: rows of important tokens; low_keys, low_values: of the others.
    """

    in_pytorch = True

    def __init__(self, policy: Tiers, index: TierIndex, chooses: bool) -> None:
        super().__init__()
        self.policy, self.index, self.chooses = policy, index, chooses
        self.low_keys: Tensor | None = None
        self.low_values: Tensor | None = None
        self.blocks: list[Block] = []
        self._layout: tuple[LayerLayout, int] | None = None
        self._length = 0

    def follow(self, layout: LayerLayout, heads_per_kv: int, dtype: torch.dtype) -> None:
        self._layout = layout, heads_per_kv

    def begin(self, mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> None:
        self._length = length
        if self.chooses:
            self.index.append(mask, batch_size, length, device)

    def attend(self, step: Step) -> Tensor:
        parameters, query = step.parameters, step.query
        self.begin(step.mask, len(step.value), seq_len_of(query), query.device)
        self.follow(parameters.layout, parameters.shape.heads_per_kv, query.dtype)
        step.cache.update(step.key, step.value, step.layer_idx)
        output, log_sums = attend_to_tiers(parameters, self, query, step.mask, step.rotations.read)
        self.finish_step(log_sums)
        return output

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the rows of new tokens; `blocks` are then what this step's attention sees. Returns the rows."""
        length = key_states.shape[2]
        if self._layout is None or self._length != length or self.index.seen != self.seen + length:
            raise UsageError(
                f"cache policy {self.policy.method}: the model's attention does not know that its cache has tiers.",
                "Load a checkpoint that `rotor export` wrote, and give it the policy with rotor.use_cache_policy().",
            )
        high, _, demotion = self._rows_on(key_states.device)
        new = high.cut_key(key_states), high.cut_value(value_states)
        if self.keys is None or self.values is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = new
            self.low_keys = demotion.cut_key(new[0][:, :, :0]).clone()  # a view would keep alive what it was cut from
            self.low_values = demotion.cut_value(new[1][:, :, :0]).clone()
        else:
            self.keys = torch.cat([self.keys, new[0]], dim=2)
            self.values = torch.cat([self.values, new[1]], dim=2)
        self.seen += length
        if not self.chooses:
            self._apply()
        self.blocks = self._blocks()
        return key_states, value_states

    def finish_step(self, log_sums: Tensor) -> None:
        """Attention is done.

        Args:
            log_sums: [batch_size, length, num_heads], the log-sum-exp of each query head's logits over all blocks.
        """
        self.blocks = []
        if self.chooses:
            self.index.choose(log_sums)
            self._apply()

    def fill(self, key_states: Tensor, value_states: Tensor) -> None:
        self.begin(None, len(key_states), key_states.shape[2], key_states.device)
        self.update(key_states, value_states)
        self.finish_step(torch.zeros(len(key_states), key_states.shape[2], 1, device=key_states.device))

    def mask_of(self, block: Block, mask: Tensor | None) -> Tensor | None:
        """The mask of a block, for a layer's mask over all tokens so far; None: all are seen, or causal."""
        if block.places is None:
            return mask
        places = block.places.unsqueeze(1)
        if mask is None and self._length == 1 and bool((places >= 0).all()):
            return None
        return mask_of_places(mask, places, self.seen - self._length, self._length, None)

    def _rows_on(self, device: torch.device) -> tuple[TierRows, TierRows, TierRows]:
        """What the tiers keep of new rows, high and low; and what is left of a high row that becomes a low one."""
        assert self._layout is not None
        return rows_of_tiers(self.policy, *self._layout, device)

    def _blocks(self) -> list[Block]:
        """Those that hold something."""
        assert self.keys is not None
        assert self.values is not None
        assert self.low_keys is not None
        assert self.low_values is not None
        high, low, _ = self._rows_on(self.keys.device)
        slots = self.keys.shape[2], self.low_keys.shape[2]
        places = [self.index.places(tier, count) for tier, count in zip((HIGH, LOW), slots, strict=True)]
        both = (
            Block(high, self.keys, self.values, places[0]),
            Block(low, self.low_keys, self.low_values, places[1]),
        )
        found = [block for block in both if block.key.shape[2]]
        if len(found) == 1 and found[0].key.shape[2] == self.seen:
            whole = found[0]
            return [Block(whole.rows, whole.key, whole.value, None)]
        return found

    def _apply(self) -> None:
        """Take the rows where the index says that they belong."""
        move = self.index.take(self.seen)
        if move is None:
            raise UsageError(
                f"cache policy {self.policy.method}: a layer was run before the one whose choice it repeats, layer "
                f"{self.index.layer}.",
                "Run the whole model on each step.",
            )
        if move.high is None or move.low is None:
            return
        for side in ("key", "value"):
            high, low = getattr(self, f"{side}s"), getattr(self, f"low_{side}s")
            demotion = self._rows_on(high.device)[2]
            cut = demotion.cut_key if side == "key" else demotion.cut_value
            setattr(self, f"low_{side}s", _rows(torch.cat([low, cut(_rows(high, move.demoted))], dim=2), move.low))
            setattr(self, f"{side}s", _rows(high, move.high))

    def stored_bytes(self) -> int:
        own = tensor_bytes([self.keys, self.values, self.low_keys, self.low_values])
        return own + (tensor_bytes([self.index.tiers, self.index.scores]) if self.chooses else 0)

    def reset(self) -> None:
        self.keys = self.values = self.low_keys = self.low_values = None
        self.blocks, self.seen, self._length, self.is_initialized = [], 0, 0, False
        if self.chooses:
            self.index.reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            rows = torch.arange(len(self.keys), device=self.keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices.to(tensor.device)])
        if self.chooses:
            self.index.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; those before them stay as they were cut.

        Raises:
            UsageError: a positive number.
        """
        count = self.removable(tokens_to_remove)
        if count == 0:
            return
        self.seen -= count
        if self.chooses:
            self.index.crop(count)
        self._apply()

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values", "low_keys", "low_values"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, function(tensor))


@lru_cache(maxsize=1024)
def rows_of_tiers(
    policy: Tiers, layout: LayerLayout, heads_per_kv: int, device: torch.device
) -> tuple[TierRows, TierRows, TierRows]:
    """What the tiers keep of whole rows, high and low; and what is left of a high row that becomes a low one."""
    high, low = policy.layouts(layout)
    parts = heads_per_kv, device
    return (
        tier_rows(layout, layout, high, *parts),
        tier_rows(layout, layout, low, *parts),
        tier_rows(layout, high, low, *parts),
    )


def _rows(states: Tensor, index: Tensor) -> Tensor:
    """The rows `index`, [batch_size, slots], of [batch_size, 1, *, width]; any row for an index below 0."""
    index = index.clamp(min=0).to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(-1, 1, -1, states.shape[3]))


def attend_to_tiers(
    parameters: AttentionParameters,
    layer: TieredLayer,
    query: Tensor,
    mask: Tensor | None,
    key_rotation: Rotation | None,
) -> tuple[Tensor, Tensor]:
    """Attention to all blocks that a layer holds.

    Args:
        parameters: of the layer, whole.
        query, mask, key_rotation: as in `reference.attention`, over all tokens so far.
    Returns:
        [batch_size, seq_len, sum over query heads of value width] in query's dtype, and the log-sum-exp of each query
        head's logits, [batch_size, seq_len, num_heads].
    """
    widths = [group.values.width for group in parameters.layout.groups for _ in range(parameters.heads_per_group)]
    outputs, log_sums = [], []
    for block in layer.blocks:
        output, log_sum = _block_attention(parameters, block, query, layer.mask_of(block, mask), key_rotation)
        if output.shape[-1] < sum(widths):  # what is cut is 0
            whole = output.new_zeros(*output.shape[:-1], sum(widths))
            output = whole.index_copy_(-1, block.rows.output, output)
        outputs.append(output)
        log_sums.append(log_sum)
    found, log_sum = (outputs[0], log_sums[0]) if len(outputs) == 1 else join(outputs, log_sums, widths)
    return found.to(query.dtype), log_sum


def _block_attention(
    parameters: AttentionParameters, block: Block, query: Tensor, mask: Tensor | None, key_rotation: Rotation | None
) -> tuple[Tensor, Tensor]:
    rows, basis = block.rows, parameters.query_basis
    if basis is None:
        query = query[..., rows.query]
    else:
        basis = basis[:, rows.basis]
    own = replace(parameters, layout=rows.layout, query_basis=basis)
    if key_rotation is not None and block.places is not None:
        key_rotation = rows_of(key_rotation, block.places.clamp(min=0).unsqueeze(1))
    return partial_attention(query, block.key, block.value, own, key_rotation, mask)
