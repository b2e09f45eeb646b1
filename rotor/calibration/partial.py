"""An unfinished run: what calibration has done so far, layer by layer, in a folder beside the run (`RUN.partial`).

A layer counts as done when `work/progress.json` says so, which is written last and holds the SHA-256 of its files. The
hidden states that enter the next layer are among them, so that a resumed run goes on exactly where the other ended.
The folder becomes the run with all of `work/`, which goes last: at no moment is there a partial run that does not say
what it was begun with.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, DataError, NumericsError, UsageError
from ..format.atomic import replacing, sync, write_json
from ..format.hashes import file_sha256
from ..format.json_differences import differences, shorten_json
from ..format.json_files import read_json
from ..format.manifest import entries_below, write_manifest
from ..format.places import OutputFolder, check_removable, is_ours, mark_unfinished, remove
from ..format.publishing import publish_folder, write_tensors
from ..logs import log
from ..models.layerwise import new_states

FINGERPRINT, PROGRESS, WORK = "fingerprint.json", "progress.json", "work"
LAYER_FOLDERS = ("bases", "codes")
START_AGAIN = "Give --overwrite to start again."


class PartialRun:
    """The folder `OUT.partial`. Whoever writes to it holds the lock of OUT (see rotor.format.locks).

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
        """Make the folder, or go on with the one that is there.

        Raises:
            CheckpointError: it cannot be written, or what is done is not what was written then.
        """
        self.resumed = self.exists and resume
        if not self.resumed:
            self.remove()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not is_ours(self.folder):
                mark_unfinished(self.folder, "run")
            self.work.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written ({error.strerror}).", "Choose another place."
            ) from error
        for name, digest in self._done().items():
            _check(self.folder / name, digest, "its layer was finished")

    def agree(self, fingerprint: dict[str, Any]) -> None:
        """Keep what the run depends on, or compare with what was kept.

        Raises:
            UsageError: it differs; names what.
        """
        path = self.work / FINGERPRINT
        new = json.loads(json.dumps(fingerprint))
        if not path.is_file():
            if self.finished_layers:
                raise UsageError(f"{path}: is gone, so nobody knows what the run was begun with.", START_AGAIN)
            write_json(path, new)
            return
        found = [
            f"{name} was {shorten_json(old)}, now is {shorten_json(now)}"
            for name, old, now in differences(read_json(path, START_AGAIN), new)
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
        done, names = self._done(), [f"{WORK}/{self._states(finished_layers).name}"]
        names += [name for name in entries_below(self.folder) if name.split("/")[0] in LAYER_FOLDERS]
        sync(self.folder / names[0])
        files = {name: done.get(name) or file_sha256(self.folder / name) for name in names}
        sync(self.work)
        write_json(self.work / PROGRESS, {"finished_layers": finished_layers, "files": files})
        self._states(finished_layers - 1).unlink(missing_ok=True)

    def states(self, layer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for the hidden states that enter a layer; those of a resumed run are in it."""
        return new_states(shape, dtype, self._states(layer))

    def _states(self, layer: int) -> Path:
        return self.work / f"states-{layer:04d}.bin"

    def _progress(self) -> dict[str, Any]:
        path = self.work / PROGRESS
        return read_json(path, START_AGAIN) if path.is_file() else {}

    def _done(self) -> dict[str, str]:
        """SHA-256 of the files of finished layers, by name."""
        return dict(self._progress().get("files", {}))

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Keep tensors that were costly to get."""
        with replacing(self.work / name) as temporary:
            write_tensors(temporary, tensors)

    def kept(self, name: str) -> Path | None:
        path = self.work / name
        return path if path.is_file() else None

    def publish(self) -> None:
        """The folder becomes the run."""
        files = {name: digest for name, digest in self._done().items() if not name.startswith(WORK)}
        write_json(self.work / PROGRESS, {"finished_layers": self.finished_layers, "files": files})
        for path in self.work.iterdir():
            if path.name not in (FINGERPRINT, PROGRESS):  # what is large; the rest is needed until the run is there
                path.unlink()
        write_manifest(self.folder, "run", files)
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


def _check(path: Path, digest: Any, when: str) -> None:
    if not path.is_file() or file_sha256(path) != digest:
        raise CheckpointError(f"{path}: is not what was written when {when}.", START_AGAIN)
