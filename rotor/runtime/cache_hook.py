"""Where a cache policy takes part in attention. The policies themselves are above: rotor.policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from .rope import Rotations


class AttendingLayer(ABC):
    """One layer of a cache that stores a step's rows, and attends to what it holds, in its own way.

    in_pytorch: attention to it runs in plain PyTorch, whatever the device.
    """

    in_pytorch = False

    @abstractmethod
    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Any,
        mask: Tensor | None,
        rotations: Rotations,
        dropout: float,
        kernels: bool,
    ) -> Tensor:
        """Store the rows of new tokens, and let the queries attend to what is held.

        Args:
            module: the layer's RotorAttention.
            query, key, value: as in `reference.attention`, of the new tokens.
            cache: transformers', of which this is a layer.
            mask, rotations: over all tokens so far.
            kernels: queries come as the Triton kernels take them, and these run.
        """


class CachePolicy(Protocol):
    """What a compressed layer knows of a policy."""

    def adopt(self, cache: Any, config: Any) -> None:
        """Put the policy's layers in place of those of an empty cache, unless it has them already."""


def attending_layer(cache: Any, index: int, policy: CachePolicy | None, config: Any) -> AttendingLayer | None:
    """The layer of a cache that follows a policy: its own, or that of `policy`, which it adopts; None if neither."""
    if cache is None:
        return None
    if policy is not None:
        policy.adopt(cache, config)
    layers = getattr(cache, "layers", [])
    found = layers[index] if index < len(layers) else None
    return found if isinstance(found, AttendingLayer) else None


def stored_policies() -> Any:
    """rotor.policies, for a checkpoint that stores a policy: loaded when one does."""
    return import_module("rotor.policies")
