"""Settings of a calibration or an export: one object for the command, its dry run and the Python function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..errors import MissingError, UsageError
from ..format.file_names import RECIPE
from . import EXPORT_SECTIONS, Recipe, load_recipe, override

CONFIDENCE = 0.95
"""The confidence of the intervals that are measured."""

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")

Offload = Literal["auto", "never", "always"]
"""When weights are read layer by layer instead of all being in memory; `auto`: when they do not fit."""


def check_offload(name: str) -> Offload:
    """Raises UsageError if it is none of the choices."""
    if name not in get_args(Offload):
        raise UsageError(f"--offload {name}: expected one of {', '.join(get_args(Offload))}.")
    return name  # type: ignore[return-value]


def check_accuracies(option: str, values: Iterable[float]) -> None:
    """Raises UsageError unless they lie between 0 and 1; at 1 no rounding of any weight would be allowed."""
    for value in values:
        if not 0 < value < 1:
            raise UsageError(
                f"{option} {value:g}: expected a share above 0 and below 1 of the model's accuracy.",
                f"Example: {option} 0.99",
            )


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

    def check(self) -> None:
        """Raises UsageError for a name that is none; whether the device is there is seen when it is used."""
        kind, _, index = self.device.partition(":")
        if self.device != "auto" and (kind not in DEVICES or not (index.isdecimal() or self.device == kind)):
            raise UsageError(f"--device {self.device}: no such device type.", "Give auto, cpu, cuda or cuda:N.")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: expected auto, {', '.join(DTYPES)}.")
        check_offload(self.offload)


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

    def check(self) -> Recipe:
        """The recipe, overridden; raises UsageError for what is wrong whatever the model is. Needs no torch."""
        self.compute.check()
        return load_recipe(self.recipe, self.overrides)


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
        if self.accuracy is not None:
            check_accuracies("--accuracy", [self.accuracy])
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
    compute: Compute = Compute()
    overwrite: bool = False
    measure: bool = True
    cache: str | None = None

    def check(self) -> None:
        """Raises UsageError for what is wrong whatever the run holds but for its recipe. Needs no torch.

        Raises:
            MissingError: the run is no folder.
        """
        self.goal.check()
        self.compute.check()
        check_accuracies("--targets", self.targets)
        if self.targets and self.goal.accuracy is None:
            raise UsageError("--targets are searched beside an accuracy.", "Give --accuracy, too.")
        if not self.measure and self.goal.accuracy is not None:
            raise UsageError("--no-measure: an --accuracy is found by measuring.", "Give --compression in its place.")
        run = Path(self.run)
        if not run.is_dir():
            raise MissingError(f"{run}: no such folder.", "Give a folder that `rotor calibrate` wrote.")
        if (run / RECIPE).is_file():
            self.override(load_recipe(str(run / RECIPE)))

    def override(self, recipe: Recipe) -> Recipe:
        """The recipe of a run with what this export changes of it."""
        kind = [] if self.objective is None else [f"objective.kind={self.objective}"]
        return override(recipe, [*self.overrides, *kind], EXPORT_SECTIONS)
