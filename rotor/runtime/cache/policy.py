"""What a cache policy is, how it is written down, and the layers that follow it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...errors import UnsupportedModelError, UsageError
from ...typed import Reader, nearest_name, shorten
from .codec import tensor_bytes
from .layer import PolicyLayer


class Policy(ABC):
    """A method that codes or thins out a cache, with its parameters. Subclasses are frozen dataclasses, a file each.

    needs_weights: attention has to hand out its weights. needs_states: and what the layers' hidden states are.
    evicts: tokens are dropped, so that attention has to go by stored positions. rows_only: it is for the rows of a
    compressed model.
    """

    method: ClassVar[str]
    evicts: ClassVar[bool] = False
    rows_only: ClassVar[bool] = False

    @property
    def needs_weights(self) -> bool:
        return False

    @property
    def needs_states(self) -> bool:
        return False

    @property
    @abstractmethod
    def longest_step(self) -> int | None:
        """The longest step after the prompt whose tokens see what they would see in steps of one; None: any."""

    @abstractmethod
    def layers(self, count: int) -> list[PolicyLayer]:
        """Empty layers of one cache, for a model of so many."""

    @abstractmethod
    def check_coded(self) -> None:
        """Raises UsageError unless the policy can hold rows of codes."""

    def as_dict(self) -> dict[str, Any]:
        """As it is stored, for read_policy."""
        fields = asdict(self)  # type: ignore[call-overload]
        return {"method": self.method, **{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}}

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


def check_config(policy: Policy, config: Any) -> int:
    """The number of layers of a model that the policy can serve.

    Raises:
        UnsupportedModelError: a layer's cache is not a plain one (sliding windows, linear attention).
    """
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedModelError(
                f"cache policy {policy.method}: layer {index} of the model has a {type(layer).__name__}, expected full "
                "attention in every layer.",
                "Use this model without a cache policy.",
            )
    return len(layers)


def stored_bytes(cache: Cache) -> int:
    """Bytes of all tensors of a cache, of rotor's or of transformers' own: codes, their metadata, positions, scores,
    and what is not yet coded."""
    return sum(_layer_bytes(layer) for layer in cache.layers)


def _layer_bytes(layer: Any) -> int:
    return layer.stored_bytes() if isinstance(layer, PolicyLayer) else tensor_bytes(vars(layer))
