"""What a metric is: an accuracy of a compressed model against the uncompressed one, 1 where nothing is lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..evaluation import Scores
from ..layerwise import LayerwiseModel


@dataclass(frozen=True)
class Measurement:
    """The accuracy of one compressed model on one split.

    value: 1 is equal to the uncompressed model, below 1 is worse.
    interval: its 95 % interval, or None if it cannot be told.
    fields: what is recorded in the rank table beside the next-token ratios, the value among it.
    """

    value: float
    interval: tuple[float, float] | None
    fields: dict[str, Any] = field(default_factory=dict)


class Metric(ABC):
    """One metric of one evaluation; it may remember what it found out about the uncompressed model.

    name: as in `evaluation.metric`.
    needs_reference: whether the Scores it is given must have kl_div.
    """

    needs_reference = False

    def __init__(self, name: str) -> None:
        self.name = name

    def measure_base(self, model: LayerwiseModel, split: str) -> dict[str, Any]:
        """Run the uncompressed model on a split, once, before any `measure`; returns what is to be recorded of it.

        Raises:
            DataError: the uncompressed model or its tokenizer cannot be measured like this.
        """
        del model, split
        return {}

    @abstractmethod
    def measure(self, model: LayerwiseModel, split: str, base: Scores, scores: Scores) -> Measurement:
        """The accuracy of a compressed model.

        Args:
            model: the compressed model; for metrics with prompts of their own.
            split: `search` or `report`.
            base, scores: next-token results of the uncompressed and of the compressed model on the text of the split.
        """
