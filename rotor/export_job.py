"""What an export is asked to do, checked against the run and its model before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .checkpoint import Checkpoint, check_space, check_writable, file_sha256
from .errors import CheckpointError, UsageError
from .families import Family, find_family
from .recipe import EXPORT_SECTIONS, Recipe, override
from .run import Run
from .settings import ExportSettings, Goal


@dataclass(frozen=True)
class ExportJob:
    """An export, with everything that is known before any work. recipe: the run's, with what was overridden."""

    settings: ExportSettings
    run: Run
    recipe: Recipe
    checkpoint: Checkpoint
    out: Path

    @classmethod
    def check(cls, settings: ExportSettings) -> ExportJob:
        """Raises RotorError where the request cannot be carried out; see export."""
        settings.goal.check()
        for target in settings.targets:
            if not 0 < target <= 1:
                raise UsageError(
                    f"--targets {target:g}: expected accuracies above 0 and at most 1.", "Example: 0.99,0.95"
                )
        if settings.targets and settings.goal.accuracy is None:
            raise UsageError("--targets are searched beside an accuracy.", "Give --accuracy, too.")
        opened, out = Run.open(settings.run), Path(settings.out)
        kind = [] if settings.objective is None else [f"objective.kind={settings.objective}"]
        recipe = override(opened.recipe, [*settings.overrides, *kind], EXPORT_SECTIONS)
        if recipe.objective.kind != "memory" and recipe.ranks.method != "global":
            raise UsageError(
                f"objective {recipe.objective.kind}: only ranks.method global weighs anything but bytes, this run's "
                f"is {recipe.ranks.method}.",
                "Give --set ranks.method=global, or leave the objective at memory.",
            )
        if settings.elastic and settings.goal.accuracy is None:
            raise UsageError(
                "--elastic stores ranks by accuracy.", "Give --accuracy, the profile that is used by default."
            )
        if settings.elastic and recipe.bases.refit:
            raise UsageError(
                "--elastic needs nested columns, and this run refits W_o for each rank.",
                "Calibrate again with --set bases.refit=false.",
            )
        check_writable(out, settings.overwrite, [opened.model_folder, opened.folder])
        job = cls(settings, opened, recipe, Checkpoint(opened.model_folder), out)
        check_space(job.out, job.needed_bytes)
        return job

    @property
    def goal(self) -> Goal:
        return self.settings.goal

    @property
    def targets(self) -> tuple[float, ...]:
        """Further accuracies to search: those asked for, or of an elastic checkpoint the recipe's."""
        return self.settings.targets or (self.recipe.search.targets if self.settings.elastic else ())

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
        """Raises CheckpointError if a file of the run's model is not the one that was calibrated."""
        model, path = self.run.info["model"], self.checkpoint.folder / file
        recorded = {**model["shards"], **model.get("files", {})}
        if not path.is_file() or recorded.get(file) != file_sha256(path):
            raise CheckpointError(
                f"{self.checkpoint.folder / file}: changed since calibration.", "Calibrate again, or restore the file."
            )
