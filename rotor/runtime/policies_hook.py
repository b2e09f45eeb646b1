"""Cache policies for checkpoints that name one: they are above this package, and `rotor` says how they are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


class CachePolicies(Protocol):
    """Part of `rotor.policies` that loading a checkpoint with a cache policy needs."""

    def read_stored(self, section: object, /) -> Any:
        """Read the policy that a checkpoint's config names."""

    def attach_stored(self, model: PreTrainedModel, network: nn.Module, policy: Any, /) -> None:
        """Give it to the model."""


find_policies: Callable[[], CachePolicies]
"""Imports them; called for the first checkpoint that has a policy."""
