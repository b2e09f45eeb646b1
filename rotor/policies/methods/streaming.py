"""StreamingLLM: the first tokens of a row, on which attention rests, and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from ..eviction import Eviction


@dataclass(frozen=True)
class Streaming(Eviction):
    """The first `sinks` tokens and the newest b - sinks; of a budget of no more than that, the newest takes one place.

    Args:
        sinks: first tokens that stay.

    Positions are those within the cache. The paper evicts while it reads; here the prompt, the first step, sees itself.
    Source: Xiao et al., StreamingLLM (arXiv 2309.17453), section 3.2.
    """

    method: ClassVar[str] = "streaming"
    sinks: NonNegativeInt = 4
    positions: Literal["sequence", "cache"] = "cache"

    def protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        sinks = torch.minimum(torch.full_like(budget, self.sinks), budget - 1)
        return sinks, budget - sinks
