"""The newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..eviction import Eviction


@dataclass(frozen=True)
class Window(Eviction):
    """The newest b tokens.

    Limits: models lean on their first tokens and lose their way without them; see StreamingLLM.
    Source: Beltagy et al., Longformer (arXiv 2004.05150), as SqueezeAttention's "Sliding Window".
    """

    method: ClassVar[str] = "window"

    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(budget), budget
