"""An unfinished run: what calibration has done so far, layer by layer, in a folder beside the run (`RUN.partial`).

A layer counts as done when `work/progress.json` says so, which is written when its files and the hidden states that
enter the next layer are on the disk, so that a resumed run goes on exactly where the other ended. That file also says
what the run was begun with. It goes last, when the folder has become the run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.atomic import replacing, sync, write_json
from ..checkpoint.json_differences import differences, shorten_json
from ..checkpoint.json_files import read_json
from ..checkpoint.manifest import write_manifest
from ..checkpoint.output_folder import OutputFolder, check_removable, mark_unfinished, remove
from ..checkpoint.publishing import publish_folder, write_tensors
from ..errors import DataError, NumericsError, UsageError
from ..logs import log
from ..models.layerwise import new_states

PROGRESS, WORK = "progress.json", "work"
START_AGAIN = "Give --overwrite to start again."


class PartialRun:
    """The folder `OUT.partial`. Whoever writes to it holds the lock of OUT (see rotor.checkpoint.locks).

    Args:
        out: the run folder that it will become.
    """

    def __init__(self, out: OutputFolder) -> None:
        self.out, self.folder = out, out.partial
        self.work, self.resumed = self.folder / WORK, False

    @property
    def exists(self) -> bool:
        return self.folder.is_dir()

    def check(self, resume: bool, overwrite: bool) -> None:
        """Raises UsageError if there is an unfinished run and it was not said what to do with it, or something else."""
        if self.exists and not resume and not overwrite:
            raise UsageError(
                f"{self.folder}: an unfinished run is there.",
                "Give --resume to go on with it, or --overwrite to start again.",
            )
        if self.exists:
            check_removable(self.folder, "run")
        elif resume:
            log.info("--resume: no unfinished run is at %s; this one begins at the start.", self.folder)

    def open(self, resume: bool) -> None:
        """Make the folder, or go on with the one that is there."""
        self.resumed = self.exists and resume
        if not self.resumed:
            self.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        mark_unfinished(self.folder, "run")
        self.work.mkdir(exist_ok=True)

    def agree(self, fingerprint: dict[str, Any]) -> None:
        """Keep what the run depends on, or compare with what was kept.

        Raises:
            UsageError: it differs; names what.
        """
        new, progress = json.loads(json.dumps(fingerprint)), self._progress()
        if not progress:
            write_json(self.work / PROGRESS, {"finished_layers": 0, "begun_with": new})
            return
        found = [
            f"{name} was {shorten_json(old)}, now is {shorten_json(now)}"
            for name, old, now in differences(progress.get("begun_with"), new)
        ]
        if found:
            raise UsageError(
                f"{self.folder}: was begun with something else: {'; '.join(found)}.",
                f"Give what it was begun with. {START_AGAIN}",
            )

    @property
    def finished_layers(self) -> int:
        return int(self._progress().get("finished_layers", 0))

    def commit(self, finished_layers: int) -> None:
        """All files of the layers before are on disk, and so are the states that enter the next."""
        sync(self._states(finished_layers))
        sync(self.work)
        write_json(self.work / PROGRESS, {**self._progress(), "finished_layers": finished_layers})
        self._states(finished_layers - 1).unlink(missing_ok=True)

    def states(self, layer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for the hidden states that enter a layer; those of a resumed run are in it."""
        return new_states(shape, dtype, self._states(layer))

    def _states(self, layer: int) -> Path:
        return self.work / f"states-{layer:04d}.bin"

    def _progress(self) -> dict[str, Any]:
        path = self.work / PROGRESS
        return read_json(path, START_AGAIN) if path.is_file() else {}

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Keep tensors that were costly to get."""
        with replacing(self.work / name) as temporary:
            write_tensors(temporary, tensors)

    def kept(self, name: str) -> Path | None:
        path = self.work / name
        return path if path.is_file() else None

    def publish(self) -> None:
        """The folder becomes the run."""
        for path in self.work.iterdir():
            if path.name != PROGRESS:  # which is needed until the run is there
                path.unlink()
        write_manifest(self.folder, "run")
        publish_folder(self.folder, self.out)
        shutil.rmtree(self.out.path / WORK)

    def remove(self) -> None:
        if self.exists:
            remove(self.folder, "run")

    def ended(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Remove it where work on it has failed, unless --resume can go on with it: its numbers are not bad, and a
        layer is finished or it was there before.
        """
        bad = isinstance(error, (NumericsError, DataError))
        if bad or (error is not None and not self.resumed and not self.finished_layers):
            self.remove()
