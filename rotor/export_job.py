"""What an export is asked to do, checked against the run and its model before any work is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import Checkpoint, check_space, check_writable, file_sha256
from .errors import CheckpointError, UsageError
from .families import Family, find_family
from .recipe import EXPORT_SECTIONS, Recipe, override
from .run import Run


@dataclass(frozen=True)
class Goal:
    """Exactly one of accuracy, compression and removal rate is given."""

    accuracy: float | None = None
    compression: float | None = None
    removal_rate: float | None = None

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


@dataclass(frozen=True)
class ExportJob:
    """An export, with everything that is known before any work. recipe: the run's, with what was overridden."""

    run: Run
    recipe: Recipe
    checkpoint: Checkpoint
    out: Path
    goal: Goal
    elastic: bool
    overwrite: bool

    @classmethod
    def check(
        cls,
        run: str | Path,
        out: str | Path,
        goal: Goal,
        overrides: Iterable[str],
        objective: str | float | None,
        elastic: bool,
        overwrite: bool,
    ) -> ExportJob:
        """Raises RotorError where the request cannot be carried out; see export."""
        goal.check()
        opened = Run.open(run)
        kind = [] if objective is None else [f"objective.kind={objective}"]
        recipe = override(opened.recipe, [*overrides, *kind], EXPORT_SECTIONS)
        if recipe.objective.kind != "memory" and recipe.ranks.method != "global":
            raise UsageError(
                f"objective {recipe.objective.kind}: only ranks.method global weighs anything but bytes, this run's "
                f"is {recipe.ranks.method}.",
                "Give --set ranks.method=global, or leave the objective at memory.",
            )
        if elastic and goal.accuracy is None:
            raise UsageError(
                "--elastic stores ranks by accuracy.", "Give --accuracy, the profile that is used by default."
            )
        if elastic and recipe.bases.refit:
            raise UsageError(
                "--elastic needs nested columns, and this run refits W_o for each rank.",
                "Calibrate again with --set bases.refit=false.",
            )
        check_writable(Path(out), overwrite, [opened.model_folder, opened.folder])
        job = cls(opened, recipe, Checkpoint(opened.model_folder), Path(out), goal, elastic, overwrite)
        check_space(job.out, job.needed_bytes)
        return job

    @property
    def sources(self) -> list[Path]:
        """Folders that must not be written to."""
        return [self.checkpoint.folder, self.run.folder]

    @property
    def needed_bytes(self) -> int:
        """Disk that is asked for before anything is written: a compressed one is about as large as its source."""
        return int(self.checkpoint.total_bytes() * 1.1) + (1 << 20)

    @property
    def family(self) -> Family:
        return find_family(self.checkpoint.config)

    def check_unchanged(self, file: str) -> None:
        """Raises CheckpointError if a shard of the run's model is not the one that was calibrated."""
        if self.run.info["model"]["shards"].get(file) != file_sha256(self.checkpoint.folder / file):
            raise CheckpointError(
                f"{self.checkpoint.folder / file}: changed since calibration.", "Calibrate again, or restore the file."
            )
