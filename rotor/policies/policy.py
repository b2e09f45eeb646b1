"""The base class of cache policies: parameters, plain data, and the models that a policy can serve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..checked import Expect, JsonObject, Reader, shorten
from ..checkpoint.layout import AttentionShape, ExactTokens, LayerLayout
from ..checkpoint.sizes import CacheSize
from ..errors import UnsupportedModelError, UsageError
from ..kernels.parameters import row_dtype
from ..runtime.exact_rows import WithExactRows
from .layer import PolicyLayer
from .store import tensor_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Bits = Annotated[int, Expect((8, 4, 3, 2).__contains__, "one of 8, 4, 3, 2")]
"""Bits of a number."""

LONG_TOKENS = 32768
"""Tokens of context to which bytes are extrapolated."""

Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class LayerSample:
    """Input of a layer's cache on calibration text, on the CPU in float32.

    keys, values: [sequences, seq_len, width over all heads]. key_gradients, value_gradients: the gradients of the
    model's summed next-token loss by them; None for policies that need none.
    """

    keys: Tensor
    values: Tensor
    key_gradients: Tensor | None = None
    value_gradients: Tensor | None = None


class Policy(ABC):
    """A method that codes or thins out a cache, with its parameters. Subclasses are frozen dataclasses, one a file.

    A parameter's type says which values it may have. method: its name in recipes. needs_weights: it needs attention
    weights. needs_gradients: it is fitted to samples with gradients. rows_only: it serves compressed models alone.
    """

    method: ClassVar[str]
    needs_weights: ClassVar[bool] = False
    needs_gradients: ClassVar[bool] = False
    rows_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        reader, hints = Reader(f"cache policy {self.method}", UsageError), get_type_hints(type(self), None, None, True)
        for field in fields(self):  # type: ignore[arg-type]
            reader.read(hints[field.name], getattr(self, field.name), field.name)

    @property
    def needs_states(self) -> bool:
        """Tell whether its layers need `observe_states`."""
        return False

    @property
    def moves_keys(self) -> bool:
        """Tell whether keys are stored or read at other positions than their own; layers then get a `table`."""
        return False

    @property
    def needs_samples(self) -> bool:
        """Tell whether the policy must still be fitted to calibration text."""
        return False

    def fitted(self, samples: Sequence[LayerSample]) -> Policy:
        """Fit the policy to calibration text, given a sample of each layer."""
        return self

    @property
    def longest_step(self) -> int | None:
        """The longest step after the prompt whose tokens see what they would see in steps of one; None: any."""
        return 1

    holds_windows = False
    """True where layers with a window keep all tokens, of which attention sees the window's; see `beyond_windows`."""

    @abstractmethod
    def layers(self, count: int) -> list[PolicyLayer]:
        """Empty layers of one cache, for a model of `count` layers."""

    def check_rows(self, coded: bool, post_rope: bool) -> None:  # noqa: B027
        """Check that the policy can hold rows of a compressed model; raises UsageError if not.

        Args:
            coded: rows are codes, not 16-bit numbers. post_rope: keys are compressed after RoPE.
        """

    def check_exact(self, exact: ExactTokens | None) -> None:
        """Raise UsageError if a compressed model keeps tokens exactly beside its rows: a policy keeps rows alone."""
        if exact is not None:
            raise UsageError(
                f"cache policy {self.method}: the checkpoint keeps {exact.first} first and {exact.newest} newest "
                "tokens exactly beside its rows, which no policy does.",
                "Leave the policy out (--cache none), or export with --set exact.first=0 --set exact.newest=0.",
            )

    def check_config(self, config: PreTrainedConfig) -> int:
        """Check that the policy can serve a model; returns its number of layers.

        Raises:
            UnsupportedModelError: a layer's cache is not a plain one (sliding windows, linear attention), or RoPE's
                frequencies depend on the length and the policy moves keys.
        """
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
        if self.moves_keys and not {"longrope", "dynamic"}.isdisjoint(kinds):
            raise UnsupportedModelError(
                f"cache policy {self.method}: moves keys to other positions, and the frequencies of this model's RoPE "
                "depend on the length.",
                "Use another policy, or of `streaming` a YAML file with `positions: sequence`.",
            )
        layers = DynamicCache(config=config).layers
        for index, layer in enumerate(layers):
            if not self._replaces(layer):
                raise UnsupportedModelError(
                    f"cache policy {self.method}: layer {index} of the model has a {type(layer).__name__}, expected "
                    "full attention in every layer.",
                    "Use this model without a cache policy.",
                )
        return len(layers)

    def _replaces(self, layer: Any) -> bool:
        """Tell whether the policy's layers can stand in the place of such a layer of a cache."""
        return type(layer) is DynamicLayer or (self.holds_windows and type(layer) is DynamicSlidingWindowLayer)

    def adopt(self, cache: Cache, config: PreTrainedConfig) -> None:
        """Put the policy's layers in place of those of a cache that holds nothing; do nothing if it has some already.

        Raises:
            UsageError: a cache of another kind (static, quantised), or one that was filled without the policy.
        """
        layers: list[Any] = cache.layers
        if layers and isinstance(layers[0], PolicyLayer):
            return
        for index, layer in enumerate(layers):
            if not self._replaces(layer) or layer.get_seq_length():
                raise UsageError(
                    f"cache policy {self.method}: layer {index} of the cache is a {type(layer).__name__} of "
                    f"{layer.get_seq_length()} tokens, expected an empty one that grows.",
                    "Begin with an empty cache, and leave cache_implementation out.",
                )
        layers[:] = self.layers(config.get_text_config().num_hidden_layers)

    def as_dict(self) -> JsonObject:
        """The policy as plain data, which registry.read_policy reads."""
        kind = type(self)
        bundled = kind.__module__.startswith(f"{__package__}.")
        method = self.method if bundled else f"{kind.__module__}:{kind.__qualname__}"
        return {"method": method, **TypeAdapter(kind).dump_python(self, mode="json")}

    def require(self, fits: bool, name: str, expected: str) -> None:
        """Raise UsageError, which names the parameter, its value and what was expected, unless it fits."""
        if not fits:
            got = shorten(getattr(self, name))
            raise UsageError(f"cache policy {self.method}: {name}: got {got}, expected {expected}.")


def stored_bytes(cache: Cache) -> int:
    """Bytes of all tensors of a cache, rotor's or transformers': codes, their metadata, positions, scores, and tokens
    that are not yet coded or that are kept exactly too."""

    def of_layer(layer: Any) -> int:
        if isinstance(layer, PolicyLayer):
            return layer.stored_bytes()
        exact = layer.exact_rows.stored_bytes() if isinstance(layer, WithExactRows) else 0
        return tensor_bytes(vars(layer)) + exact

    return sum(of_layer(layer) for layer in cache.layers)


def packed_layer_bytes(policy: Policy, layouts: Sequence[LayerLayout], dtype: torch.dtype, tokens: int) -> list[float]:
    """Bytes of each layer of a compressed model's cache for each token of a prompt of `tokens`.

    Budgets that depend on the prompt (`squeeze`) are taken as equal, which they are in the mean.
    """
    by_layer = []
    for layer, layout in zip(policy.layers(len(layouts)), layouts, strict=True):
        widths, kind = layout.row_elements(dtype.itemsize), row_dtype(layout, dtype)
        rows = [random_rows(1, tokens, width, kind) for width in widths]
        layer.follow(layout, dtype)
        layer.fill(rows[0], rows[1])
        by_layer.append(layer.stored_bytes() / tokens)
    return by_layer


def packed_bytes_per_token(policy: Policy, layouts: Sequence[LayerLayout], dtype: torch.dtype, tokens: int) -> float:
    """Bytes of a compressed model's cache for each token of a prompt of `tokens`, all layers."""
    return sum(packed_layer_bytes(policy, layouts, dtype, tokens))


def packed_size(
    policy: Policy, layouts: Sequence[LayerLayout], shape: AttentionShape, dtype: torch.dtype, tokens: int
) -> CacheSize:
    """The size of a compressed model's cache that a policy keeps of a prompt of `tokens`, everything counted."""
    return CacheSize.of_rows(packed_layer_bytes(policy, layouts, dtype, tokens), shape, dtype.itemsize)


def random_rows(heads: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """[1, heads, tokens, width] of random numbers, or bytes."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.uint8:
        return torch.randint(256, (1, heads, tokens, width), generator=generator, dtype=dtype)
    return torch.randn(1, heads, tokens, width, generator=generator).to(dtype)
