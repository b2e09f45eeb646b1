"""Settings of a calibration or an export: one object for the command, its dry run and the Python function."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from . import Recipe

CONFIDENCE = 0.95
"""The confidence of the intervals that are measured."""


@dataclass(frozen=True)
class Compute:
    """Device and dtype of the forward passes.

    device, dtype: `auto` is the GPU if there is one, and float32 on a CPU. Statistics are float64 in any case.
    offload: `always` reads one layer of weights at a time, `never` loads all, `auto` does what fits.
    device_map: as in transformers' from_pretrained, e.g. `auto`: spread the model over several GPUs.
    """

    device: str = "auto"
    dtype: str = "auto"
    offload: str = "auto"
    device_map: str | None = None


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of `rotor.calibrate`; its arguments are explained there."""

    model: str | Path
    out: str | Path
    recipe: str | Recipe = "rotor"
    overrides: tuple[str, ...] = ()
    revision: str | None = None
    compute: Compute = Compute()
    batch_tokens: int = 2048
    overwrite: bool = False
    resume: bool = False


@dataclass(frozen=True)
class Goal:
    """Exactly one of accuracy, compression and removal rate is given.

    confidence: with an accuracy, CONFIDENCE asks that the lower end of the interval reaches it; None: the value itself.
    """

    accuracy: float | None = None
    compression: float | None = None
    removal_rate: float | None = None
    confidence: float | None = None

    def check(self) -> None:
        """Raises UsageError if not one, or out of range."""
        options = {
            "--accuracy": self.accuracy,
            "--compression": self.compression,
            "--removal-rate": self.removal_rate,
        }
        given = [name for name, value in options.items() if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"got {' and '.join(given) or 'no goal'}, expected one of --accuracy, --compression, --removal-rate.",
                "Example: --accuracy 0.99",
            )
        if self.accuracy is not None and not 0 < self.accuracy <= 1:
            raise UsageError(
                f"--accuracy {self.accuracy}: expected a share above 0 and at most 1.", "Example: --accuracy 0.99"
            )
        if self.compression is not None and not 0 < self.compression < 1:
            raise UsageError(
                f"--compression {self.compression}: expected a share between 0 and 1.", "Example: --compression 0.5"
            )
        if self.removal_rate is not None and not 0 <= self.removal_rate < 1:
            raise UsageError(
                f"--removal-rate {self.removal_rate}: expected at least 0, below 1.", "Example: --removal-rate 0.1"
            )
        if self.confidence is not None and (self.confidence != CONFIDENCE or self.accuracy is None):
            raise UsageError(
                f"--confidence {self.confidence}: expected {CONFIDENCE}, together with --accuracy.",
                f"Example: --accuracy 0.99 --confidence {CONFIDENCE}",
            )


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `rotor.export`; its arguments are explained there."""

    run: str | Path
    out: str | Path
    goal: Goal
    targets: tuple[float, ...] = ()
    overrides: tuple[str, ...] = ()
    objective: str | float | None = None
    elastic: bool = False
    compute: Compute = Compute()
    overwrite: bool = False
    measure: bool = True
    cache: str | None = None
