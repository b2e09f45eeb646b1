"""What a cache policy is, how it is written down, and the cache that follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...errors import UnsupportedModelError, UsageError
from ...typed import Reader, nearest_name, shorten
from .codec import tensor_bytes
from .layer import CodedLayer
from .store import Stream

BITS = (16, 8, 4, 3, 2)


class Policy(ABC):
    """A method that codes a cache, with its parameters. Subclasses are frozen dataclasses, one file each."""

    method: ClassVar[str]

    @abstractmethod
    def streams(self) -> tuple[Stream, Stream]:
        """How keys and values are coded."""

    @property
    def longest_step(self) -> int | None:
        """The longest step after the prompt whose tokens see what they would see in steps of one; None: any."""
        steps = [step for step in (stream.longest_step for stream in self.streams()) if step is not None]
        return min(steps, default=None)

    def as_dict(self) -> dict[str, Any]:
        """As it is stored, for read_policy."""
        return {"method": self.method, **asdict(self)}  # type: ignore[call-overload]

    def require(self, fits: bool, name: str, expected: str) -> None:
        """Raises UsageError, naming the parameter, its value and what was expected, unless it fits."""
        if not fits:
            got = shorten(getattr(self, name))
            raise UsageError(f"cache policy {self.method}: {name}: got {got}, expected {expected}.")


def read_policy(section: Any, reader: Reader, methods: Mapping[str, type[Policy]]) -> Policy:
    """A policy from plain data of unknown origin.

    Args:
        section: a mapping with `method` and the parameters of that method.
        methods: by name, those that there are.
    Raises:
        reader.error: no such method, an unknown parameter, or a value that does not fit.
    """
    if not isinstance(section, Mapping):
        raise reader.fail("cache", section, "a mapping with a method and its parameters")
    method = section.get("method")
    if not isinstance(method, str) or method not in methods:
        known = ", ".join(methods)
        raise reader.fail("cache.method", method, f"one of {known}{nearest_name(method, methods).rstrip('.')}")
    fields = {key: value for key, value in section.items() if key != "method"}
    try:
        policy: Policy = reader.read(methods[method], fields, "cache")
    except UsageError as error:
        raise reader.error(f"{reader.where}: {error.message}", reader.hint) from error
    return policy


def make_cache(policy: Policy, config: Any, attention_mask: Tensor | None = None) -> Cache:
    """A cache that follows a policy, for `model(..., past_key_values=cache)` and `generate`.

    Args:
        config: the model's transformers config.
        attention_mask: [batch_size, seq_len] of a prompt that is padded on the left. Without it the policy takes
            padding for tokens, which changes nothing where each token is coded by itself.
    Raises:
        UnsupportedModelError: a layer's cache is not a plain one (sliding windows, linear attention).
        UsageError: the padding is not on the left.
    """
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedModelError(
                f"cache policy {policy.method}: layer {index} of the model has a {type(layer).__name__}, expected full "
                "attention in every layer.",
                "Use this model without a cache policy.",
            )
    padding = None
    if attention_mask is not None and not bool(attention_mask.all()):
        padding = (attention_mask == 0).sum(-1)
        if bool((attention_mask.diff(dim=-1) < 0).any()):
            raise UsageError(
                "the attention mask has padding that is not on the left of its row.", "Set padding_side='left'."
            )
    return Cache(layers=[CodedLayer(policy.streams(), padding) for _ in layers])


def stored_bytes(cache: Cache) -> int:
    """Bytes of all tensors of a cache, of rotor's or of transformers' own: codes, their metadata, and what is not yet
    coded."""
    return sum(_layer_bytes(layer) for layer in cache.layers)


def _layer_bytes(layer: Any) -> int:
    return layer.stored_bytes() if isinstance(layer, CodedLayer) else tensor_bytes(vars(layer))
