"""The layers of a compressed model as a saved cache has them: what a cache holds of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..checkpoint.layout import ExactTokens
from ..errors import UsageError
from ..kernels.parameters import row_dtype
from .attention import RotorAttention
from .exact_rows import (
    ExactDynamicLayer,
    ExactSlidingWindowLayer,
    ExactState,
    ExactStaticLayer,
    ExactStaticSlidingWindowLayer,
    WithExactRows,
)
from .steps import CacheRows

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

SAVED_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    ExactDynamicLayer,
    ExactSlidingWindowLayer,
    ExactStaticLayer,
    ExactStaticSlidingWindowLayer,
}
"""Kinds of layers that hold nothing but rows and exact tokens."""


class SavedLayer(NamedTuple):
    """An attention layer of a model.

    place: in caches. window: tokens of its sliding window, as transformers' caches have it. exact: that it keeps.
    """

    place: int
    module: RotorAttention
    window: int | None
    exact: ExactTokens | None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.o_proj.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what the model computes."""
        dtype: torch.dtype = self.module.o_proj.weight.dtype
        return dtype

    @property
    def row_dtype(self) -> torch.dtype:
        return row_dtype(self.module.layout, self.dtype)

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a token's key row and value row."""
        return self.module.layout.row_elements(self.dtype.itemsize)

    def held_tokens(self, tokens: int) -> int:
        """Tokens of which it keeps rows."""
        return tokens if self.window is None else min(tokens, self.window - 1)


class Held(NamedTuple):
    """Content of a cache for a layer: how many tokens came, the rows of the newest of them, and exact tokens."""

    tokens: int
    keys: Tensor
    values: Tensor
    exact: ExactState | None


def layers_of(model: PreTrainedModel) -> list[SavedLayer]:
    """The attention layers of a model.

    Raises:
        UsageError: it is no compressed model, or keeps something else than rows and exact tokens.
    """
    modules = {module.layer_idx: module for module in model.modules() if isinstance(module, RotorAttention)}
    if not modules:
        raise UsageError("the model is no compressed checkpoint: its cache has no rows.", "Load one of rotor's.")
    layers = []
    for index, kind in enumerate(DynamicCache(config=model.config).layers):
        module = modules.get(index)
        if module is None and type(kind).__name__ == "DummyLayer":
            continue  # reads the cache of another layer
        if module is None or type(kind) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UsageError(
                f"layer {index} keeps a state in a {type(kind).__name__}, which a saved cache has no place for.",
                "Save caches of models whose layers all attend to keys and values.",
            )
        if module.store != CacheRows():
            raise UsageError(
                f"layer {index}: the cache follows a policy or lies on several processes, and is not saved.",
                "Leave the cache policy out, and run the model in one process.",
            )
        window = kind.sliding_window if isinstance(kind, DynamicSlidingWindowLayer) else None
        exact, windows = module.layout.exact, module.shape.windows
        if exact is not None:
            exact = exact.within(windows[index] if windows else None)
        layers.append(SavedLayer(index, module, window, exact))
    return layers


def held_by(cache: Cache, layer: SavedLayer) -> Held:
    """Content of a cache for a layer; raises UsageError if that is nothing, or not of this model."""
    layers = getattr(cache, "layers", [])
    held: Any = layers[layer.place] if layer.place < len(layers) else None
    if type(held) not in SAVED_LAYERS:
        kind = type(cache if held is None else held).__name__
        raise UsageError(
            f"layer {layer.place}: a {kind} cannot be saved.",
            "Save a DynamicCache or StaticCache that the model filled.",
        )
    tokens = int(held.get_seq_length())
    if not tokens:
        raise UsageError(
            f"layer {layer.place}: the cache is empty.", "Fill it first: model(input_ids, use_cache=True)."
        )
    stored = min(tokens, held.keys.shape[2])  # a static layer has room for more
    rows = slice(stored - layer.held_tokens(tokens), stored)
    keys, values = held.keys[:, :, rows].detach(), held.values[:, :, rows].detach()
    exact = held.exact_rows.state(tokens) if isinstance(held, WithExactRows) else None
    expected = [((1, width), layer.row_dtype) for width in layer.widths]
    fits = [((side.shape[1], side.shape[3]), side.dtype) for side in (keys, values)] == expected
    if not fits or (exact is None) != (layer.exact is None) or (exact and exact.keys.dtype != layer.dtype):
        raise UsageError(
            f"layer {layer.place}: the cache holds keys of {keys.shape[1]} heads of {keys.shape[3]} in {keys.dtype}, "
            f"expected {layer.widths[0]} in {layer.row_dtype}: another model filled it.",
            "Save a cache with the model that filled it, in its dtype.",
        )
    return Held(tokens, keys, values, exact)
