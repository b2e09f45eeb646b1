"""An unfinished run: the finished layers of a calibration, in a folder beside the run (`RUN.partial`).

`work/progress.json` says which layers are done. It is written after a layer's files and the hidden states that enter
the next layer are on disk, so that a resumed run continues exactly where the other ended. It also records the inputs
of the run. It is deleted last, after the folder has become the run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..checked import JsonObject
from ..checkpoint.files import differences, read_json, replacing, shorten_json, sync, write_json
from ..checkpoint.manifest import write_manifest
from ..checkpoint.output_folder import OutputFolder, check_removable, mark_unfinished, remove
from ..checkpoint.publishing import publish_folder, write_tensors
from ..errors import DataError, NumericsError, UsageError
from ..logs import log
from ..models.layerwise import new_states
from .gradient_files import GradientFiles

PROGRESS, WORK = "progress.json", "work"
TOKENS_FILE, BEGUN_TOKENS_FILE = "tokens.safetensors", "tokens-begun.safetensors"
"""Text that the model wrote, kept so that a resumed run need not write it again: all of it, and the part so far."""
START_AGAIN = "Give --overwrite to start again."


class PartialRun:
    """The folder `OUT.partial`. Writers hold the lock of OUT (see rotor.checkpoint.locks).

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
        """Raise UsageError for an existing folder without --resume or --overwrite, or one that is no unfinished run."""
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
        """Create the folder, or continue with the existing one."""
        self.resumed = self.exists and resume
        if not self.resumed:
            self.remove()
        self.folder.mkdir(parents=True, exist_ok=True)
        mark_unfinished(self.folder, "run")
        self.work.mkdir(exist_ok=True)

    def agree(self, fingerprint: JsonObject) -> None:
        """Compare the inputs of the run with those that are recorded, and record those that are not yet.

        Raises:
            UsageError: they differ; names the differences.
        """
        new = json.loads(json.dumps(fingerprint))
        progress = self._progress() or {"finished_layers": 0}
        recorded = progress.get("begun_with", {})
        both = new.keys() & recorded.keys()
        changed = [
            f"{name} was {shorten_json(old)}, now is {shorten_json(now)}"
            for name, old, now in differences(
                {name: recorded[name] for name in both}, {name: new[name] for name in both}
            )
        ]
        if changed:
            raise UsageError(
                f"{self.folder}: was begun with something else: {'; '.join(changed)}.",
                f"Give what it was begun with. {START_AGAIN}",
            )
        if new.keys() - recorded.keys():
            write_json(self.work / PROGRESS, progress | {"begun_with": recorded | new})

    @property
    def finished_layers(self) -> int:
        return int(self._progress().get("finished_layers", 0))

    def commit(self, finished_layers: int) -> None:
        """Mark layers as finished, once their files and the states that enter the next layer are on disk."""
        sync(self._states(finished_layers))
        sync(self.work)
        write_json(self.work / PROGRESS, {**self._progress(), "finished_layers": finished_layers})
        self._states(finished_layers - 1).unlink(missing_ok=True)

    def states(self, layer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate the hidden states that enter a layer; a resumed run finds its own in the file."""
        return new_states(shape, dtype, self._states(layer))

    def _states(self, layer: int) -> Path:
        return self.work / f"states-{layer:04d}.bin"

    def _progress(self) -> JsonObject:
        path = self.work / PROGRESS
        return read_json(path, START_AGAIN) if path.is_file() else {}

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Store tensors that were costly to compute, for a resumed run."""
        with replacing(self.work / name) as temporary:
            write_tensors(temporary, tensors)

    def kept(self, name: str) -> Path | None:
        """File of tensors that `keep` stored, or None."""
        path = self.work / name
        return path if path.is_file() else None

    def publish(self) -> None:
        """Turn the folder into the run."""
        for path in self.work.iterdir():
            if path.name != PROGRESS:  # it is needed until the run is published
                path.unlink()
        write_manifest(self.folder, "run")
        publish_folder(self.folder, self.out)
        shutil.rmtree(self.out.path / WORK)

    def remove(self) -> None:
        if self.exists:
            remove(self.folder, "run")

    def ended(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove the folder after a failure, unless --resume can use it.

        It can if the numbers are not bad and something that took long is there, or the run was itself resumed.
        """
        bad = isinstance(error, (NumericsError, DataError))
        if bad or (error is not None and not self.resumed and not self.holdings()):
            self.remove()

    def holdings(self) -> str:
        """Stages that a resumed run need not compute again, in words; empty if that is nothing."""
        if layers := self.finished_layers:
            return f"{layers} finished layer(s)"
        if gradients := GradientFiles(self.work).in_words():
            return gradients
        if self.kept(TOKENS_FILE) is not None:
            return "the text that the model wrote"
        return "a part of the text that the model writes" if self.kept(BEGUN_TOKENS_FILE) is not None else ""
