"""One pass of a layer: where its rows are kept, and how its queries attend to them.

A layer's store is chosen when its model is loaded: transformers' caches (`CacheRows`), with or without a policy of
`rotor.policies`. While a sequence lies on several processes, `rotor.parallel` puts its own store there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..checkpoint.kernel_config import LayerKernels
from ..checkpoint.layout import ExactTokens, LayerLayout
from ..errors import UsageError
from ..kernels.exact_slots import ExactSlots, SlotsToFill
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..kernels.passes import Pass, Passes, TokenSpan
from ..kernels.reference.attention import attention, dense_attention
from ..kernels.reference.exact import ExactKeys, RowKeys, attend_to_both
from ..kernels.rotary import rotate
from .exact_rows import Division, NewTokens, SeenTokens, division_of_pass, exact_slots, first_real, with_exact_rows
from .rope import Rotations, is_same

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

    from ..kernels.attention import StepAhead

Arguments = dict[str, Any]
"""Keyword arguments of a forward pass of transformers', by their names."""

NO_GRADIENTS = "this checkpoint caches codes, which have no gradients: it cannot be trained."
NO_GRADIENTS_HINT = "Export a run of rows of numbers (recipe rotor-16), and train that."


class Ahead(NamedTuple):
    """Work that the launch which makes a step's rows, of one new token of each sequence, does beside.

    fill: where it stores the token exactly; None where the store does so itself. step: the step whose queries it
    absorbs.
    """

    fill: SlotsToFill | None = None
    step: StepAhead | None = None


class AttentionCall(NamedTuple):
    """Input of a layer's attention in one pass.

    parameters: the layer without queries and rows. query, key, value: of the new tokens, as `reference.attention` takes
    them. cache: transformers', or None. mask, rotations: over all tokens so far. kernels: how the Triton kernels run
    the layer, for which the queries were made; None: plain PyTorch runs it.
    now: the pass, which says where its tokens lie.
    exact: the new tokens as the model makes them, in a layer with exact tokens.
    ahead: what was done where the rows were made.
    """

    parameters: AttentionParameters
    layer_idx: int
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Cache | None
    mask: Tensor | None
    rotations: Rotations
    now: Pass
    kernels: LayerKernels | None = None
    exact: NewTokens | None = None
    ahead: Ahead | None = None

    def cached(self) -> tuple[Tensor, Tensor]:
        """Store the rows of the new tokens in the cache, which there must be; all rows of the layer."""
        assert self.cache is not None
        _check_rows(self.cache, self.layer_idx, self.key)
        return self.cache.update(self.key, self.value, self.layer_idx)


Attend = Callable[[AttentionCall], Tensor]
"""Attention of a pass over what a store has of a layer."""


class SharedRows(NamedTuple):
    """Rows that a layer hands, in place of keys, to those that read its cache in the same pass.

    call: of the layer. attend: attention of such a call over what was stored by it.
    """

    call: AttentionCall
    attend: Attend

    def attended(self, query: Tensor) -> Tensor:
        """Attention of the queries of another layer, [batch_size, seq_len, num_heads * head_dim].

        Args:
            query: [batch_size, num_heads, seq_len, head_dim], of the newest tokens of the pass, rotated as the model
                does, heads as it has them.
        """
        call, exact = self.call, self.call.exact
        assert exact is not None
        shape, order = call.parameters.shape, list(call.parameters.layout.kv_head_order)
        missing = exact.key.shape[2] - query.shape[2]
        query = query.unflatten(1, (shape.num_kv_heads, -1))[:, order].flatten(1, 2)
        query = functional.pad(query, (0, 0, missing, 0))  # transformers leaves out what nobody asked for
        by_index, given = call.rotations.query, call.rotations.given
        if by_index is not None and given is not None and not is_same(by_index, given):
            wide = torch.promote_types(query.dtype, torch.float32)
            before = rotate(query.to(wide), given[0].to(wide), -given[1].to(wide))
            query = rotate(before, by_index[0].to(wide), by_index[1].to(wide)).to(query.dtype)
        output = self.attend(call._replace(query=query, exact=exact._replace(query=query)))[:, missing:]
        output = without_gradients(output, call.parameters.layout)
        places = [order.index(head) for head in range(len(order))]
        return output.unflatten(-1, (shape.num_kv_heads, -1))[:, :, places].flatten(2)

    def to(self, device: torch.device, non_blocking: bool = False) -> SharedRows:
        """Itself: accelerate moves what layers share with the hidden states.

        Raises:
            UsageError: to another device.
        """
        wanted, here = torch.device(device), self.call.query.device
        if wanted.type != here.type or wanted.index not in (None, here.index):
            raise UsageError(
                f"layer {self.call.layer_idx} is on {here}, and one on {device} reads its cache.",
                "Load the model on one device: device_map='cuda:0'.",
            )
        return self


class RowStore(ABC):
    """Keeps the rows of a layer and attends to them; a layer of a cache that follows a policy is one.

    in_pytorch: attention runs in plain PyTorch, whatever the device.
    """

    in_pytorch = False

    @cached_property
    def passes(self) -> Passes:
        """The passes that layers with this store are in."""
        return Passes()

    def reads_rows(self, cache: Cache | None) -> bool:
        """Tell whether rows are stored or read; else a layer with exact tokens makes none."""
        return True

    def ahead(self, call: AttentionCall) -> Ahead | None:
        """Plan what the launch that makes rows is to do beside; None: nothing.

        Args:
            call: of the kernels, with queries, keys and values as projections put them out.
        """
        return None

    @abstractmethod
    def store_and_attend(self, call: AttentionCall) -> Tensor:
        """Store the rows of the new tokens, then attend to all rows that the queries see.

        Returns:
            [batch_size, seq_len, sum over query heads of value width], in a layer with exact tokens of head_dim.
        """

    def stored(self, call: AttentionCall) -> Attend:
        """Store the rows of the new tokens, and let several layers attend to all rows.

        Raises:
            UsageError: the store serves one layer alone.
        """
        raise UsageError(
            f"layer {call.layer_idx}: other layers read its cache, which {type(self).__name__} does not serve.",
            "Leave the cache policy out, and run the model in one process.",
        )


@dataclass(frozen=True)
class CacheRows(RowStore):
    """Transformers' caches. policy, config: the cache policy that takes over empty caches, and the model's config."""

    policy: Any = None
    config: PreTrainedConfig | None = None

    def token_span(self, cache: Cache | None, layer_idx: int, seq_len: int) -> TokenSpan:
        """Where the tokens of a pass lie."""
        if cache is None:
            return TokenSpan(0, seq_len, 0, seq_len)
        kv_len, kv_offset = cache.get_mask_sizes(seq_len, layer_idx)
        return TokenSpan(cache.get_seq_length(layer_idx), seq_len, kv_offset, kv_len)

    def reads_rows(self, cache: Cache | None) -> bool:
        return cache is not None

    def row_store(self, cache: Cache | None, layer_idx: int) -> RowStore:
        """The store of the rows of a pass: this one, or the cache's layer if that follows a policy."""
        if self.policy is not None and cache is not None:
            self.policy.adopt(cache, self.config)
        layers = getattr(cache, "layers", ())
        layer = layers[layer_idx] if layer_idx < len(layers) else None
        return layer if isinstance(layer, RowStore) else self

    def ahead(self, call: AttentionCall) -> Ahead | None:
        parameters, span = call.parameters, call.now.span
        if call.cache is None or span.seq_len > 1 or getattr(call.cache, "offloading", False):
            return None
        _check_mask(call.mask, call.layer_idx, (len(call.query), parameters.shape.num_heads, 1, span.kv_len))
        fill = slots = None
        if parameters.layout.exact is not None:
            exact = exact_tokens(parameters, call.layer_idx)
            layer = with_exact_rows(call.cache, call.layer_idx, exact)
            found = layer.exact_rows.step(_start_of(call.mask, call.now), span.query_offset, layer.fixed)
            if found is None:
                return None
            fill, slots = found[0], exact_slots(exact, found[1], call.now)
        return Ahead(fill, _absorbing(call, slots))

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        return self.stored(call)(call)

    def stored(self, call: AttentionCall) -> Attend:
        if call.exact is not None:
            return _stored_exactly(call)
        key, value = (call.key, call.value) if call.cache is None else call.cached()
        return partial(attend_to_rows, key=key, value=value)


def _stored_exactly(call: AttentionCall) -> Attend:
    """Store rows and exact tokens in a cache, and let layers attend to both; see kernels.reference.exact."""
    exact, span = call.exact, call.now.span
    assert exact is not None
    expected = (len(exact.key), call.parameters.shape.num_heads, span.seq_len, span.kv_len)
    _check_mask(call.mask, call.layer_idx, expected)
    mask = _over_all_keys(call.mask, span)
    if call.cache is None:
        return partial(_attend_to_prompt, mask=mask)
    tokens = exact_tokens(call.parameters, call.layer_idx)
    layer = with_exact_rows(call.cache, call.layer_idx, tokens)
    filled = call.ahead is not None and call.ahead.fill is not None
    named = {"exact": exact, "start": _start_of(call.mask, call.now), "span": span, "filled": filled}
    key, value = call.cache.update(call.key, call.value, call.layer_idx, **named)
    seen = layer.take_seen()
    if seen is None:
        return partial(_attend_to_prompt, mask=mask)
    if call.kernels is None:
        division = division_of_pass(tokens, seen, mask, call.now)
        return partial(_attend_by_division, key=key, value=value, seen=seen, division=division)
    if mask is None and span.seq_len > 1:
        mask = call.now.once(("causal", key.device), lambda: _causal(span, key.device))
    slots = exact_slots(tokens, seen, call.now)
    return lambda other: attend_to_rows(other._replace(mask=mask), key, value, slots)


def _absorbing(call: AttentionCall, slots: ExactSlots | None) -> StepAhead | None:
    """`kernels.attention.step_ahead` of a call; None where its queries are absorbed later."""
    if call.rotations.table is None or call.kernels is None:
        return None
    from ..kernels.attention import step_ahead  # imports Triton

    return step_ahead(
        (len(call.query), 1, call.now.span.kv_len),
        call.query.dtype,
        call.query.device,
        call.parameters,
        call.kernels,
        rotation=call.rotations.table,
        first=call.rotations.first,
        attention_mask=_over_all_keys(call.mask, call.now.span),
        exact=slots,
        now=call.now,
    )


def _over_all_keys(mask: Tensor | None, span: TokenSpan) -> Tensor | None:
    return mask.expand(-1, -1, -1, span.kv_len) if mask is not None and mask.shape[-1] < span.kv_len else mask


def _start_of(mask: Tensor | None, now: Pass) -> Tensor | int:
    """`first_real` of a pass, found once for its layers."""
    return now.once(("first real",), lambda: first_real(_over_all_keys(mask, now.span), now.span))


def _attend_to_prompt(call: AttentionCall, mask: Tensor | None) -> Tensor:
    assert call.exact is not None
    return attend_to_prompt(call.exact, call.parameters, mask)


def _attend_by_division(
    call: AttentionCall, key: Tensor, value: Tensor, seen: SeenTokens, division: Division
) -> Tensor:
    assert call.exact is not None
    rows = None
    if division.keys is None or len(division.keys):
        rows = RowKeys(call.query, key, value, call.rotations.read, division.rows, division.keys)
    return attend_to_both(call.exact.query, ExactKeys(seen.key, seen.value, division.exact), rows, call.parameters)


def _check_rows(cache: Cache, layer_idx: int, key: Tensor) -> None:
    """Check that a cache holds rows like the new ones; raises UsageError where another model filled it."""
    layers = getattr(cache, "layers", ())
    held = getattr(layers[layer_idx], "keys", None) if layer_idx < len(layers) else None
    if not isinstance(held, Tensor) or held.dim() != 4:
        return
    if (held.shape[1], held.shape[3]) != (key.shape[1], key.shape[3]):
        raise UsageError(
            f"layer {layer_idx}: the cache holds keys of {held.shape[1]} heads of {held.shape[3]} that another model "
            f"put there, expected rows of {key.shape[3]}.",
            "Begin with an empty cache.",
        )


def _causal(span: TokenSpan, device: torch.device) -> Tensor:
    """Mask by index, [1, 1, seq_len, kv_len]."""
    query = torch.arange(span.seq_len, device=device)[:, None] + (span.query_offset - span.kv_offset)
    return (torch.arange(span.kv_len, device=device) <= query)[None, None]


def exact_tokens(parameters: AttentionParameters, layer_idx: int) -> ExactTokens:
    """The tokens that a layer keeps exactly, within its window."""
    exact, windows = parameters.layout.exact, parameters.shape.windows
    assert exact is not None
    return exact.within(windows[layer_idx] if windows else None)


def attend_to_prompt(exact: NewTokens, parameters: AttentionParameters, mask: Tensor | None) -> Tensor:
    """Attention of new tokens behind which nothing lies: stock attention over their own keys and values.

    Args:
        mask: over all keys that a cache has room for, of which the first are the new ones.
    """
    if mask is not None:
        columns = mask[..., : exact.key.shape[2]]
        mask = parameters.mask(columns, slice(None))
    numbers = exact.query, exact.key, exact.value
    return dense_attention(*numbers, parameters.scaling, mask, parameters.softcap, parameters.sinks)


def _check_mask(mask: Tensor | None, layer_idx: int, expected: tuple[int, int, int, int]) -> None:
    """Check that a mask broadcasts to the logits, as the kernels do not; raises UsageError if not."""
    if mask is not None and any(got not in (1, size) for got, size in zip(mask.shape, expected, strict=True)):
        raise UsageError(
            f"layer {layer_idx}: an attention mask of {list(mask.shape)}, expected {list(expected)} or 1 in place of "
            "any of these (batch_size, num_heads, seq_len, kv_len).",
            "Give a mask over all cached keys and the new ones.",
        )


def attend_to_rows(call: AttentionCall, key: Tensor, value: Tensor, slots: ExactSlots | None = None) -> Tensor:
    """Attend to all rows, [batch_size, 1, kv_len, *], by the kernels or as `kernels.reference.attention` does.

    Args:
        slots: by the kernels, in a layer with exact tokens.
    """
    parameters, seq_len = call.parameters, seq_len_of(call.query)
    _check_mask(call.mask, call.layer_idx, (len(key), parameters.shape.num_heads, seq_len, key.shape[2]))
    if call.kernels is not None:
        rotation = call.rotations.table if parameters.layout.in_blocks else None
        from ..kernels.attention import rows_attention  # imports Triton

        return rows_attention(
            call.query,
            key,
            value,
            parameters,
            call.kernels,
            rotation=rotation,
            first=call.rotations.first,
            attention_mask=call.mask,
            exact=slots,
            now=call.now,
            ahead=call.ahead and call.ahead.step,
        )
    return attention(call.query, key, value, parameters, call.rotations.read, call.mask)


def without_gradients(output: Tensor, layout: LayerLayout) -> Tensor:
    """The output of a layer's attention, which refuses gradients if the layer caches codes.

    So does a pass that reads none, a prompt beside exact tokens: what is trained so is not what is served.
    """
    if layout.coded and output.requires_grad:
        output.register_hook(_refuse_gradients)
    return output


def _refuse_gradients(gradient: Tensor) -> None:
    """Raise UsageError: keys and values get no gradient through codes, so training would go wrong silently."""
    raise UsageError(NO_GRADIENTS, NO_GRADIENTS_HINT)
