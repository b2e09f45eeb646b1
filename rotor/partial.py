"""An unfinished run: what calibration has done so far, layer by layer, in a folder beside the run (`RUN.partial`).

A layer counts as done when `progress.json` says so, which is written last. The hidden states that enter the next layer
are kept, so that a resumed run goes on exactly where the other ended.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import publish_folder, read_json, sync, write_json, write_shard
from .errors import CheckpointError, UsageError
from .layerwise import new_states

FINGERPRINT, PROGRESS, WORK = "fingerprint.json", "progress.json", "work"
START_AGAIN = "Give --overwrite to start again."


class PartialRun:
    """The folder `OUT.partial`. Whoever writes to it holds the lock of OUT (see rotor.locks).

    Args:
        out: the run folder that it will become.
    """

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = self.out.with_name(f"{self.out.name}.partial")

    @property
    def exists(self) -> bool:
        return self.folder.is_dir()

    def check(self, resume: bool, overwrite: bool) -> None:
        """Raises UsageError if there is an unfinished run and it was not said what to do with it."""
        if self.exists and not resume and not overwrite:
            raise UsageError(
                f"{self.folder}: an unfinished run is there.",
                "Give --resume to go on with it, or --overwrite to start again.",
            )

    def open(self, resume: bool) -> None:
        """Make the folder, or go on with the one that is there; raises CheckpointError if it cannot be written."""
        if self.exists and not resume:
            shutil.rmtree(self.folder)
        try:
            (self.folder / WORK).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written ({error.strerror}).", "Choose another place."
            ) from error

    def agree(self, fingerprint: dict[str, Any]) -> None:
        """Keep what the run depends on, or compare with what was kept.

        Raises:
            UsageError: it differs; names what.
        """
        path = self.folder / FINGERPRINT
        new = json.loads(json.dumps(fingerprint))
        if not path.is_file():
            _write_json(path, new)
            return
        differences = _differences(read_json(path, START_AGAIN), new)
        if differences:
            raise UsageError(
                f"{self.folder}: was begun with something else: {'; '.join(differences)}.",
                f"Give what it was begun with. {START_AGAIN}",
            )

    @property
    def finished_layers(self) -> int:
        path = self.folder / PROGRESS
        return int(read_json(path, START_AGAIN).get("finished_layers", 0)) if path.is_file() else 0

    def commit(self, finished_layers: int) -> None:
        """All files of the layers before are on disk."""
        for folder in ("statistics", "bases"):
            sync(self.folder / folder)
        _write_json(self.folder / PROGRESS, {"finished_layers": finished_layers})

    def states(self, layer: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The hidden states that enter a layer, of one process's rows; two files that change places."""
        return new_states(shape, dtype, self._states_path(layer, rank))

    def sync_states(self, layer: int, rank: int) -> None:
        """Write the hidden states that enter a layer to the disk."""
        sync(self._states_path(layer, rank))

    def _states_path(self, layer: int, rank: int) -> Path:
        return self.folder / WORK / f"states-{rank}-{layer % 2}"

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Keep tensors that were costly to get."""
        path = self.folder / WORK / name
        write_shard(path.with_suffix(".tmp"), tensors)
        sync(path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def kept(self, name: str) -> Path | None:
        path = self.folder / WORK / name
        return path if path.is_file() else None

    def publish(self) -> None:
        """The folder becomes the run."""
        shutil.rmtree(self.folder / WORK)
        (self.folder / FINGERPRINT).unlink()
        publish_folder(self.folder, self.out)
        (self.out / PROGRESS).unlink()  # last, so that what is interrupted before is still a run whose layers are done

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    write_json(temporary, data)
    sync(temporary)
    temporary.replace(path)


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    """`name was X, now is Y` for each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
        return found
    return [] if old == new else [f"{where} was {_short(old)}, now is {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-6:]}"
