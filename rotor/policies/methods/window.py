"""Window: keep the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..eviction import Eviction


@dataclass(frozen=True)
class Window(Eviction):
    """Keeps the newest b tokens.

    Limits: models lean on their first tokens and lose their way without them; see StreamingLLM.
    Source: Beltagy et al., Longformer (arXiv 2004.05150), as SqueezeAttention's "Sliding Window".
    """

    method: ClassVar[str] = "window"

    def protected(self, budget: int) -> tuple[int, int]:
        return 0, budget
