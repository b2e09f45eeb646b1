"""Output folders: where a path leads, and what rotor may replace or remove there.

The only module that removes folders. It removes a folder only if a file that rotor wrote there says that it is of the
kind to be written: manifest.json in a finished folder, unfinished.json in one in the making.
Links in paths are resolved before anything is compared or written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, UsageError
from .files import read_json, sync, write_json
from .manifest import MARKERS, UNFINISHED, Kind, Manifest

MINE = "Choose another folder, or remove it yourself."


@dataclass(frozen=True)
class OutputFolder:
    """A folder that a command writes. path: absolute, with links resolved. kind: what it will be.

    A link to a folder stays a link: the folder that it leads to is replaced.
    """

    path: Path
    kind: Kind

    @classmethod
    def at(cls, given: str | Path, kind: Kind) -> OutputFolder:
        """Raises UsageError for the root of the file system."""
        path = Path(os.path.realpath(given))
        if not path.name:
            raise UsageError(f"{given}: is the root of the file system.", "Choose a folder in it.")
        return cls(path, kind)

    @property
    def partial(self) -> Path:
        """Where an unfinished run lies."""
        return self.path.with_name(f"{self.path.name}.partial")

    @property
    def staging(self) -> Path:
        """Where the folder is written before it is published."""
        return self.path.with_name(f".{self.path.name}.rotor-new")

    @property
    def replaced(self) -> Path:
        """Where the old folder lies while the new one takes its place."""
        return self.path.with_name(f".{self.path.name}.rotor-old")

    def check(self, overwrite: bool, sources: Iterable[Path], kept: Iterable[Path] = ()) -> None:
        """Check that the folder may be written; raises UsageError if not.

        Args:
            overwrite: allow a folder of the same kind there.
            sources: folders that are read: the output must not lie in them, nor they in what may be removed.
            kept: files and folders that must only not be removed.
        """
        check_apart(self.path, sources, kept, [self.path, self.partial, self.staging, self.replaced])
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: is a file.", "Choose another name.")
        if os.path.ismount(self.path) or not os.access(self.path.parent, os.W_OK):
            raise UsageError(
                f"{self.path}: is a mount point, or in a folder that cannot be written to: nothing can take its place.",
                "Choose a folder in it.",
            )
        check_removable(self.path, self.kind)
        if not overwrite and any(self.path.iterdir()):
            raise UsageError(f"{self.path}: exists and is not empty.", "Give --overwrite to replace it.")


def check_apart(out: Path, sources: Iterable[Path], kept: Iterable[Path] = (), removed: Iterable[Path] = ()) -> None:
    """Check that output and sources lie apart; raises UsageError if one lies in the other, or may be removed with it.

    Args:
        sources: folders that are read. kept: files and folders that must only not be removed.
    """
    sources = list(sources)
    real_out = Path(os.path.realpath(out))
    for source in sources:
        if real_out.is_relative_to(os.path.realpath(source)):
            raise UsageError(f"{out}: lies in {source}, which rotor reads from.", "Choose a folder outside of it.")
    real_folders = {folder: os.path.realpath(folder) for folder in (out, *removed)}
    for read in (*sources, *kept):
        linked = read.iterdir() if read.is_dir() else ()  # files of a source may be links to where they are
        for path in (read, *linked):
            real_path = Path(os.path.realpath(path))
            for folder, real_folder in real_folders.items():
                if real_path.is_relative_to(real_folder):
                    raise UsageError(f"{folder}: contains {path}, which rotor reads from.", "Choose another folder.")


def check_file(path: Path) -> None:
    """Check that a result can be written to this file, before it is computed; raises UsageError if not."""
    above = next(folder for folder in path.resolve().parents if folder.exists())
    if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
        raise UsageError(f"{path}: no file can be written there.", "Choose another place.")


def mark_unfinished(folder: Path, kind: Kind) -> None:
    """Mark a folder as being written by rotor."""
    write_json(folder / UNFINISHED, {"rotor_unfinished": 1, "kind": kind})


def unmark(folder: Path) -> None:
    """Remove the mark of a finished folder; from now on its manifest says what it is."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    sync(folder)


def check_removable(folder: Path, kind: Kind) -> None:
    """Check that a folder holds nothing, or only what rotor wrote into one of that kind; raises UsageError if not."""
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{folder}: is not a folder.", MINE)
    if not any(folder.iterdir()):
        return
    with suppress(CheckpointError):
        marker = folder / UNFINISHED
        if not marker.is_symlink() and read_json(marker) == {"rotor_unfinished": 1, "kind": kind}:
            return
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        raise UsageError(
            f"{folder}: is not empty, and nothing in it says that it is a {kind} folder that rotor wrote.", MINE
        ) from error
    if manifest.kind != kind:
        raise UsageError(f"{folder}: is a {manifest.kind} folder, and would become a {kind} folder.", MINE)
    for name in manifest.added():
        raise UsageError(f"{folder}: holds {name}, which rotor did not write.", "Move it elsewhere first.")


def remove(folder: Path, kind: Kind) -> None:
    """Remove a folder that rotor wrote, its markers last; raises UsageError if it is not one."""
    check_removable(folder, kind)
    for path in sorted(folder.iterdir(), key=lambda path: (path.name in MARKERS, path.name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()
