"""One pass of a model: where its tokens lie, and what its layers compute once for all of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


class TokenSpan(NamedTuple):
    """Where the tokens of a pass lie in the cache.

    query_offset, seq_len: index of the first new token, and number of new tokens.
    kv_offset, kv_len: index of the first key that is attended to, and number of these keys.
    indices: of the new tokens, where they are not neighbours.
    """

    query_offset: Any
    seq_len: int
    kv_offset: Any
    kv_len: int
    indices: Tensor | None = None

    def on_host(self) -> TokenSpan:
        """The same with an offset that is a number where the host knows it, else a copy of the tensor that a static
        cache counts in, which changes when tokens are stored."""
        offset = self.query_offset
        if not isinstance(offset, Tensor):
            return self
        return self._replace(query_offset=int(offset) if offset.device.type == "cpu" else offset.clone())


class Pass:
    """One pass of the layers that share a mask, a window and rotations; it holds what they computed.

    span: where its tokens lie, as of `TokenSpan.on_host`; None where nobody asks. layer: the last one that took part.
    """

    def __init__(self, span: TokenSpan | None = None) -> None:
        self._span = span
        self.layer = -1
        self._made: dict[tuple[object, ...], Any] = {}

    @property
    def span(self) -> TokenSpan:
        assert self._span is not None
        return self._span

    def once(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """The result of `make`, computed for the first layer that asks.

        Args:
            key: what is computed, and all that it depends on beside cache, span, mask and rotations of the pass.
        """
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


class _Known(NamedTuple):
    """A pass, and what tells it apart: objects, and what is compared."""

    objects: tuple[weakref.ref[Any] | None, ...]
    key: tuple[object, ...]
    now: Pass


class Passes(threading.local):
    """The passes that a thread is in; a store of rows has one for all layers.

    A layer takes part in a pass if its cache, mask and rotations are the same objects, which were not written to since,
    its tokens lie in the same place, and it comes behind the last layer that took part. The last condition tells passes
    apart whose tensors were made in inference mode, which does not count what is written to them, or whose cache was
    cut back.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def __reduce__(self) -> tuple[type[Passes], tuple[()]]:
        return Passes, ()  # copies of a model, and saved ones, are in no pass

    def find(
        self,
        cache: object,
        mask: Tensor | None,
        rotation: Tensor | None,
        span: TokenSpan,
        layer: int,
        device: torch.device,
    ) -> Pass:
        """The pass that a layer takes part in: a known one, or a new one.

        Args:
            rotation: a tensor of the rotations that the model gives its layers. device: of the layer.
        """
        numbers = tuple(None if isinstance(number, Tensor) else number for number in span[:4])
        versions = tuple(None if tensor is None else version_of(tensor) for tensor in (mask, rotation))
        objects, key = (cache, mask, rotation, span.indices), (numbers, versions, device, capturing(device))
        for known in self._known:
            same = all(ref is None if one is None else ref is not None and ref() is one
                       for ref, one in zip(known.objects, objects, strict=True))  # fmt: skip
            if same and known.key == key and known.now.layer < layer:
                known.now.layer = layer
                return known.now
        now = Pass(span.on_host())
        now.layer = layer
        refs = tuple(None if one is None else weakref.ref(one) for one in objects)
        # Passes that have gone beyond this layer have ended, or are another thread of thought: they begin anew.
        self._known = [known for known in self._known if known.now.layer < layer] + [_Known(refs, key, now)]
        return now


def capturing(device: torch.device) -> bool:
    """Tell whether what is launched goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def version_of(tensor: Tensor) -> int | None:
    """Number of times that a tensor was written to; an inference tensor does not count that."""
    return None if tensor.is_inference() else tensor._version
