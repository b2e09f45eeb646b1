"""The Triton kernels as a layer calls them, in place of plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .rope import Rotations

if TYPE_CHECKING:
    from .attention import RotorAttention


def serve(module: RotorAttention, hidden_states: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether the kernels serve a layer in this pass."""
    return False


def append(
    module: RotorAttention, query: Tensor, key: Tensor, value: Tensor, rotations: Rotations
) -> tuple[Tensor, Tensor, Tensor]:
    """As `RotorAttention.plain_rows`."""
    raise NotImplementedError


def attend(
    module: RotorAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rotations: Rotations
) -> Tensor:
    """As `RotorAttention.plain_attention`."""
    raise NotImplementedError
