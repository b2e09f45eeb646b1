"""Expected loss of plans, by what was measured of some of them and what is predicted of all.

What is lost of the accuracy is close to a power of the predicted loss, with an exponent near one: of three models at
0.79 to 0.93 removed it was 0.8 to 1.4, and near the target their ratio was constant within a tenth. Errors of single
plans around that are luck of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .evaluation.accuracy import Fidelity

FIRST_LOSS = 0.25
"""Predicted loss of the first plan that is measured, in nats for each unit of accuracy that may be lost. Plans of bits
that kept 0.99 had 0.03 to 0.7 of it (SmolLM2-135M, Gemma 3 270M, Qwen2.5-Coder-0.5B)."""

LEAST_LOST = 1 / 16
"""Least accuracy that a plan is taken to have lost, over what may be lost: less is noise."""

EXPONENT = (1.0, 0.3)
"""The exponent before anything is measured, and its standard deviation."""

BEND = 0.25
"""Error of the power law at a plan, in logarithms, for each unit of the logarithm between its loss and the target."""

MARGIN = 1.2
"""Standard errors that lie between what is expected and the target. The sample that reports is another one, so that
errors of both add up: sqrt(2) times 0.85, beyond which one of five lies."""

SIGMAS = 3.92
"""Standard deviations in a 95 % interval."""


class ExpectedLoss:
    """A power of the predicted loss, through what was measured.

    measured: indices of the plans that were.

    Args:
        losses: predicted, of each plan; positive, rising. allowed: accuracy that may be lost.
    """

    def __init__(self, losses: Sequence[float], allowed: float) -> None:
        self._log_losses, self._allowed = np.log(losses), allowed
        self.measured: dict[int, tuple[float, float]] = {}

    def add(self, index: int, fidelity: Fidelity) -> None:
        """Note what a plan lost, and the standard error of that over it."""
        lost = max(1 - fidelity.accuracy, LEAST_LOST * self._allowed)
        low, high = fidelity.interval
        self.measured[index] = lost, min(1.0, (high - low) / SIGMAS / lost)

    def choice(self, below: int) -> int | None:
        """The last plan before `below` that is expected to lose no more than may be lost, less the margin, or that was
        measured to; the first plan where none is; None where there is none."""
        if below == 0 or not len(self._log_losses):
            return None
        if not self.measured:
            wanted, expected = math.log(FIRST_LOSS * self._allowed), self._log_losses
        else:
            wanted, expected = self._fit()
        kept = np.flatnonzero(expected[:below] <= wanted)
        by_itself = [i for i, (lost, error) in self.measured.items() if lost * (1 + MARGIN * error) <= self._allowed]
        return max((*kept[-1:].tolist(), *(i for i in by_itself if i < below)), default=0)

    def explains(self, index: int) -> bool:
        """Tell whether the curve is within a factor of two of what a plan was measured to lose."""
        _, expected = self._fit()
        return abs(float(expected[index]) - math.log(self.measured[index][0])) <= math.log(2)

    def _fit(self) -> tuple[float, np.ndarray]:
        """The logarithm of what may be expected to be lost, and of what each plan is expected to lose.

        Plans count by how well they were measured and by how near to the target they are.
        """
        lost, errors = np.array(list(self.measured.values())).T
        x, y = self._log_losses[list(self.measured)], np.log(lost)
        target = math.log(self._allowed)
        far = BEND * np.abs(y - target)
        weights = 1 / (errors**2 + far**2 + 1e-4)
        near = 1 / (1 + (far / BEND) ** 2)
        error = math.sqrt(np.average(errors**2, weights=near))
        prior, deviation = EXPONENT
        center = np.average(x, weights=weights), np.average(y, weights=weights)
        dx, dy = x - center[0], y - center[1]
        exponent = (weights @ (dx * dy) + prior / deviation**2) / (weights @ dx**2 + 1 / deviation**2)
        return target - math.log1p(MARGIN * error), center[1] + exponent * (self._log_losses - center[0])
