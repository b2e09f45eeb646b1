"""Output folders: which path is which place, and what rotor may replace or remove there.

The only module that removes folders. Nothing is removed that does not say of itself, in a file that rotor wrote, that
it is a folder of the kind that is to be written: manifest.json of a finished one, unfinished.json of one in the making.
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
from .atomic import sync, write_json
from .json_files import read_json
from .manifest import MARKERS, UNFINISHED, Kind, Manifest

MINE = "Choose another folder, or remove it yourself."


@dataclass(frozen=True)
class OutputFolder:
    """A folder that a command writes. path: absolute, with links resolved: where it really is. kind: what it is to be.

    A link to a folder stays a link: what it leads to is replaced.
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
        """Where it is made."""
        return self.path.with_name(f".{self.path.name}.rotor-new")

    @property
    def replaced(self) -> Path:
        """Where the folder that it takes the place of lies until it has."""
        return self.path.with_name(f".{self.path.name}.rotor-old")

    def check(self, overwrite: bool, sources: Iterable[Path], kept: Iterable[Path] = ()) -> None:
        """Raises UsageError where the folder must not be written.

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
    """Raises UsageError where an output lies in a source, or a source in the output or what else may be removed.

    Args:
        sources: folders that are read. kept: files and folders that must only not be removed.
    """
    sources = list(sources)
    for source in sources:
        if _is_in(out, source):
            raise UsageError(f"{out}: lies in {source}, which rotor reads from.", "Choose a folder outside of it.")
    for read in (*sources, *kept):
        linked = read.iterdir() if read.is_dir() else ()  # files of a source may be links to where they are
        for path in (read, *linked):
            for folder in (out, *removed):
                if _is_in(path, folder):
                    raise UsageError(f"{folder}: contains {path}, which rotor reads from.", "Choose another folder.")


def _is_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies below it."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_file(path: Path) -> None:
    """Raises UsageError where a result cannot become this file, before it is worked for."""
    above = next(folder for folder in path.resolve().parents if folder.exists())
    if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
        raise UsageError(f"{path}: no file can be written there.", "Choose another place.")


def mark_unfinished(folder: Path, kind: Kind) -> None:
    """Say of a folder that rotor is making it."""
    write_json(folder / UNFINISHED, {"rotor_unfinished": 1, "kind": kind})


def unmark(folder: Path) -> None:
    """It is finished; from here on the manifest says what it is."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    sync(folder)


def check_removable(folder: Path, kind: Kind) -> None:
    """Raises UsageError unless a folder is empty, or an unfinished or finished one of that kind and nothing else."""
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
    """Remove a folder of rotor's, with the files that say so last; raises UsageError if it is none."""
    check_removable(folder, kind)
    for path in sorted(folder.iterdir(), key=lambda path: (path.name in MARKERS, path.name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()
