"""What a cache policy is, how it is written down, and which models it can serve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..checked import shorten
from ..errors import UnsupportedModelError, UsageError
from .layer import PolicyLayer
from .store import tensor_bytes


@dataclass(frozen=True)
class LayerSample:
    """What a layer's cache is given on calibration text, on the CPU in float32.

    keys, values: [rows, seq_len, width over all heads]. key_gradients, value_gradients: of the model's summed
    next-token loss by them.
    """

    keys: Tensor
    values: Tensor
    key_gradients: Tensor
    value_gradients: Tensor


class Policy(ABC):
    """A method that codes or thins out a cache, with its parameters. Subclasses are frozen dataclasses, a file each.

    method: its name in recipes. needs_weights: attention has to hand out its weights. evicts: tokens are dropped, so
    that attention has to go by stored positions. rows_only: it is for the rows of a compressed model.
    """

    method: ClassVar[str]
    needs_weights: ClassVar[bool] = False
    evicts: ClassVar[bool] = False
    rows_only: ClassVar[bool] = False

    @property
    def needs_states(self) -> bool:
        """Whether its layers want `observe_states`."""
        return False

    @property
    def needs_samples(self) -> bool:
        """Whether something in it is found on calibration text, and has not been."""
        return False

    def fitted(self, samples: Sequence[LayerSample]) -> Policy:
        """The policy with what is found on calibration text, of which each layer has a sample."""
        return self

    @property
    @abstractmethod
    def longest_step(self) -> int | None:
        """The longest step after the prompt whose tokens see what they would see in steps of one; None: any."""

    @abstractmethod
    def layers(self, count: int) -> list[PolicyLayer]:
        """Empty layers of one cache, for a model of so many."""

    @property
    def key_widths(self) -> tuple[int, ...]:
        """Numbers of a token's keys in each layer that the policy is for; empty where it is for any."""
        return ()

    @abstractmethod
    def check_rows(self, coded: bool) -> None:
        """Raises UsageError unless the policy can hold rows of a compressed model: of codes, or of 16-bit columns."""

    def check_widths(self, widths: Sequence[int]) -> None:
        """Raises UsageError where the policy is for other keys than those of layers of so many numbers a token."""
        for index, (expected, width) in enumerate(zip(self.key_widths, widths, strict=False)):
            if expected != width:
                raise UsageError(
                    f"cache policy {self.method}: layer {index}: ranges of {expected} key channels, the layer has "
                    f"{width}.",
                    "They are of one checkpoint: export it with --cache, or fit the policy to it.",
                )

    def check_config(self, config: Any) -> int:
        """The number of layers of a model that the policy can serve.

        Raises:
            UnsupportedModelError: a layer's cache is not a plain one (sliding windows, linear attention).
        """
        layers = DynamicCache(config=config).layers
        for index, layer in enumerate(layers):
            if type(layer) is not DynamicLayer:
                raise UnsupportedModelError(
                    f"cache policy {self.method}: layer {index} of the model has a {type(layer).__name__}, expected "
                    "full attention in every layer.",
                    "Use this model without a cache policy.",
                )
        return len(layers)

    def adopt(self, cache: Any, config: Any) -> None:
        """Put the policy's layers in place of those of a cache that holds nothing; do nothing if it has some already.

        Raises:
            UsageError: a cache of another kind (static, sliding, quantised), or one that was filled without the policy.
            UnsupportedModelError: see check_config.
        """
        layers: list[Any] = cache.layers
        if layers and isinstance(layers[0], PolicyLayer):
            return
        for index, layer in enumerate(layers):
            if type(layer) is not DynamicLayer:
                raise UsageError(
                    f"cache policy {self.method}: layer {index} of the cache is a {type(layer).__name__}, expected "
                    "one that grows.",
                    "Leave cache_implementation out, or load the model with the policy `none`.",
                )
            if layer.get_seq_length():
                raise UsageError(
                    f"cache policy {self.method}: the cache holds {layer.get_seq_length()} tokens that were stored "
                    "without it.",
                    "Begin with an empty cache.",
                )
        layers[:] = self.layers(self.check_config(config))

    def as_dict(self) -> dict[str, Any]:
        """As it is stored, for registry.read_policy."""
        kind = type(self)
        own = kind.__module__.startswith(f"{__package__}.")
        found: dict[str, Any] = _plain(asdict(self))  # type: ignore[call-overload]
        return {"method": self.method if own else f"{kind.__module__}:{kind.__qualname__}", **found}

    def require(self, fits: bool, name: str, expected: str) -> None:
        """Raises UsageError, naming the parameter, its value and what was expected, unless it fits."""
        if not fits:
            got = shorten(getattr(self, name))
            raise UsageError(f"cache policy {self.method}: {name}: got {got}, expected {expected}.")


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def stored_bytes(cache: Cache) -> int:
    """Bytes of all tensors of a cache, of rotor's or of transformers' own: codes, their metadata, positions, scores,
    and what is not yet coded."""
    return sum(
        layer.stored_bytes() if isinstance(layer, PolicyLayer) else tensor_bytes(vars(layer)) for layer in cache.layers
    )
