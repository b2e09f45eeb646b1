"""Settings of a calibration or an export: one object for the command and the Python function.

They are checked when they are made: UsageError names the option. That needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import Field

from ..checked import Expect, OneOf, Reader
from ..checkpoint.file_names import RECIPE
from ..errors import MissingError, UsageError
from . import EXPORT_SECTIONS, Recipe, load_recipe, load_stored_recipe, override

Share = Annotated[float, Field(gt=0, lt=1)]


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    return name == "auto" or (kind in ("cpu", "cuda") and (index.isdecimal() or not colon))


def _check_options(settings: Any) -> None:
    """Raises UsageError, naming the option, for a field that does not fit its type."""
    for name, kind in get_type_hints(type(settings), include_extras=True).items():
        if getattr(settings, name) is not None:
            given = get_args(kind)[0] if isinstance(kind, UnionType) else kind
            Reader(f"--{name.replace('_', '-')}", UsageError).read(given, getattr(settings, name))


@dataclass(frozen=True)
class Compute:
    """Device and dtype of the forward passes.

    device, dtype: `auto` is the GPU if there is one, and float32 on a CPU. Statistics are float64 in any case.
    offload: `always` reads one layer of weights at a time, `never` loads all, `auto` does what fits.
    """

    device: Annotated[str, Expect(_is_device, "auto, cpu, cuda or cuda:N")] = "auto"
    dtype: Annotated[str, OneOf(("auto", "float32", "bfloat16", "float16"))] = "auto"
    offload: Annotated[str, OneOf(("auto", "never", "always"))] = "auto"

    def __post_init__(self) -> None:
        """Whether the device is there is found when it is used."""
        _check_options(self)


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

    def __post_init__(self) -> None:
        _ = self.overridden_recipe

    @cached_property
    def overridden_recipe(self) -> Recipe:
        """Raises RecipeError as `load_recipe` does."""
        return load_recipe(self.recipe, self.overrides)


@dataclass(frozen=True)
class Goal:
    """Exactly one of accuracy, compression and removal rate is given."""

    accuracy: Share | None = None
    compression: Share | None = None
    removal_rate: Annotated[float, Field(ge=0, lt=1)] | None = None

    def __post_init__(self) -> None:
        given = [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"got {' and '.join(given) or 'no goal'}, expected one of --accuracy, --compression, --removal-rate.",
                "Example: --accuracy 0.99",
            )
        _check_options(self)


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `rotor.search.export`; its arguments are explained there."""

    run: str | Path
    out: str | Path
    goal: Goal
    overrides: tuple[str, ...] = ()
    compute: Compute = Compute()
    overwrite: bool = False
    measure: bool = True
    cache: str | None = None
    without_weights: bool = False
    context: Annotated[int, Field(ge=1, le=1 << 32)] | None = None

    def __post_init__(self) -> None:
        """Raises MissingError where the run is no folder; of what it holds only the recipe is read."""
        if not self.measure and self.goal.accuracy is not None:
            raise UsageError("--no-measure: an --accuracy is found by measuring.", "Give --compression in its place.")
        if self.context is not None:
            Reader("--context", UsageError).read(Annotated[int, Field(ge=1, le=1 << 32)], self.context)
        run = Path(self.run)
        if not run.is_dir():
            raise MissingError(f"{run}: no such folder.", "Give a folder that `rotor calibrate` wrote.")
        if (run / RECIPE).is_file():
            self.override(load_stored_recipe(run))

    def override(self, recipe: Recipe) -> Recipe:
        """The recipe of a run with what this export changes of it."""
        return override(recipe, self.overrides, EXPORT_SECTIONS)
