"""Attach a policy to a model: its attention modules take over the cache that `generate` hands them, before anything is
stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..checkpoint.families import Family, attention_shape, family_of, find_family, is_supported
from ..errors import UnsupportedModelError
from ..runtime.rope import RotaryTable, rotary_tables
from ..runtime.steps import CacheRows
from .layer import PolicyLayer
from .policy import Policy
from .registry import find_policy

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from ..runtime.steps import Arguments

CACHE_ARGUMENTS = ("past_key_values", "layer_past")
"""Names that families have for the cache in the forward pass of their attention."""


def use_cache_policy(model: PreTrainedModel, policy: Policy | str | None) -> None:
    """Make a causal model's own `generate` keep its cache by a policy from now on; None removes the policy.

    Args:
        policy: a policy, or a name as for --cache: a bundled one, `none`, the path of a YAML file, or FILE.py:CLASS.

    The model may be compressed or not. Policies that score tokens by attention switch an uncompressed one to the
    implementation `eager`, which stores all attention weights of a step.

    Raises:
        UnsupportedModelError: a family that rotor does not know, or a layer whose cache is not a plain one.
        RecipeError: no policy of that name.
        UsageError: the policy quantises, and the rows are codes already.
    """
    if isinstance(policy, str):
        policy = find_policy(policy)
    before = _attached.pop(model, None)
    if before is not None:
        before.remove()
    if policy is not None:
        if not is_supported(model.config):
            find_family(model.config)  # says which there are
        attach_stored(model, model, policy)


def policy_of(model: PreTrainedModel) -> Policy | None:
    """The policy of a model, given by use_cache_policy or stored in its checkpoint; None without one."""
    attached = _attached.get(model)
    return None if attached is None else attached.policy


def attach_stored(model: PreTrainedModel, network: nn.Module, policy: Policy) -> None:
    """Attach the policy that a checkpoint stores; `network` is the causal model, or one made around a base model."""
    policy.check_config(model.config)
    _attached[model] = _Attachment(model, network, policy)


@contextmanager
def cache_policy(model: PreTrainedModel, policy: Policy | str | None) -> Iterator[None]:
    """`use_cache_policy` for the length of a `with`; the policy in use before comes back after it."""
    before = policy_of(model)
    use_cache_policy(model, policy)
    try:
        yield
    finally:
        use_cache_policy(model, before)


class _Attachment:
    """A policy attached to the attention modules of a model, and their state before."""

    def __init__(self, model: PreTrainedModel, network: nn.Module, policy: Policy) -> None:
        self.policy = policy
        self._config = model.config.get_text_config()
        self._implementation = self._config._attn_implementation
        self._handles: list[RemovableHandle] = []
        family: Family = family_of(model.config)
        count = len(family.placed)
        if count < self._config.num_hidden_layers or family.sinks:
            raise UnsupportedModelError(
                f"cache policy {policy.method}: this model has layers without a cache of their own, or sinks in its "
                "softmax.",
                "Leave the policy out.",
            )
        policy.layers(count)  # raises if the policy does not fit so many layers
        modules: list[Any] = [family.attention_module(network, index) for index in range(count)]
        self._compressed = [module for module in modules if hasattr(module, "store")]
        if policy.rows_only and len(self._compressed) < count:
            index = next(index for index, module in enumerate(modules) if not hasattr(module, "store"))
            raise UnsupportedModelError(
                f"cache policy {policy.method}: layer {index} is not compressed, and only a "
                "compressed layer's channels come in the order of what they are worth.",
                "Use a checkpoint that `rotor export` wrote, or another policy.",
            )
        for module in self._compressed:
            policy.check_rows(module.layout.coded, module.layout.rope_block is None)
            policy.check_exact(module.layout.exact)
        tables: list[RotaryTable | None] = [None] * count
        if policy.moves_keys:
            tables = rotary_tables(network, family, model.config)
        store = CacheRows(policy, self._config)
        for index, (module, table) in enumerate(zip(modules, tables, strict=True)):
            hooks = _Hooks(policy, index, module in self._compressed, table)
            if hooks.compressed:
                module.store = store
            else:
                self._handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
            if policy.needs_states:
                parent = network.get_submodule(f"{family.decoder}.{family.layers}.{index}")
                self._handles.append(parent.register_forward_pre_hook(hooks.enter, with_kwargs=True))
            if policy.needs_states or not hooks.compressed:
                self._handles.append(module.register_forward_hook(hooks.after, with_kwargs=True))
        if policy.needs_weights and len(self._compressed) < count:
            self._config._attn_implementation = "eager"

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        store = CacheRows()
        for module in self._compressed:
            module.store = store
        self._config._attn_implementation = self._implementation


_attached: WeakKeyDictionary[PreTrainedModel, _Attachment] = WeakKeyDictionary()


class _Hooks:
    """Hooks around a layer's attention.

    In an uncompressed model they tell the cache's layer of the step and give attention that layer's mask. A policy that
    needs states gets those that enter the decoder layer, before and after attention is added to them.
    """

    def __init__(self, policy: Policy, index: int, compressed: bool, table: RotaryTable | None) -> None:
        self.policy, self.index, self.compressed, self.table = policy, index, compressed, table
        self._entered: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments) -> None:
        self._entered = _states_of(args, kwargs)

    def before(
        self, module: Any, args: tuple[Tensor, ...], kwargs: Arguments
    ) -> tuple[tuple[Tensor, ...], Arguments] | None:
        layer = CacheRows(self.policy, module.config).row_store(_cache_of(kwargs), self.index)
        if not isinstance(layer, PolicyLayer):
            return None
        layer.table = self.table
        mask, states = kwargs.get("attention_mask"), _states_of(args, kwargs)
        told = None if self.policy.holds_windows else mask  # which is the window's, and says nothing of padding
        layer.begin(told, states.shape[0], states.shape[1], states.device)
        shape = attention_shape(module.config).layer(self.index)
        groups = torch.arange(shape.num_kv_heads).repeat_interleave(shape.heads_per_kv)
        return args, {**kwargs, "attention_mask": layer.visible(mask, groups)}

    def after(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments, output: tuple[Tensor, ...]) -> None:
        entered, self._entered = self._entered, None
        cache = _cache_of(kwargs)
        layer = None if cache is None else cache.layers[self.index]
        if not isinstance(layer, PolicyLayer):
            return
        layer.table = None
        if not self.compressed:
            layer.observe_weights(output[1] if self.policy.needs_weights else None)
        if entered is not None:
            layer.observe_states(entered, entered + output[0])


def _cache_of(kwargs: Arguments) -> Cache | None:
    return next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)


def _states_of(args: tuple[Tensor, ...], kwargs: Arguments) -> Tensor:
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states
