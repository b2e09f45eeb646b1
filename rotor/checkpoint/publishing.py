"""Write whole folders: made beside their place, flushed to the disk, then renamed; safetensors files; disk space.

A command that publishes a folder holds its lock (rotor.checkpoint.locks), so anything else under the folder's temporary
names was left by a process that ended.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, UsageError
from .files import sync
from .output_folder import OutputFolder, mark_unfinished, remove, unmark


@contextmanager
def staged_folder(out: OutputFolder, overwrite: bool, sources: list[Path], needed_bytes: int) -> Iterator[Path]:
    """Make a folder that appears whole or not at all: it is written elsewhere on the same disk, then published.

    Args:
        overwrite, sources: see OutputFolder.check.
        needed_bytes: checked against the free disk space first.
    Raises:
        UsageError: `out` must not be written. CheckpointError: the disk is too small or fails.
    """
    out.check(overwrite, sources)
    out.path.parent.mkdir(parents=True, exist_ok=True)
    recover(out)
    out.check(overwrite, sources)  # again: an old folder may have been put back
    check_space(out.path, needed_bytes)
    staging = out.staging
    try:
        staging.mkdir()
        mark_unfinished(staging, out.kind)
        yield staging
        publish_folder(staging, out)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{out.path}: writing failed: {reason}", "Nothing was changed there.") from error
    finally:
        with suppress(OSError, UsageError):  # it has been published
            remove(staging, out.kind)


def check_space(place: Path, needed_bytes: int) -> None:
    """Raises CheckpointError if the disk that a folder is on, or is to be, has less free space than needed."""
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{place}: {free / 1e6:,.1f} MB free, {needed_bytes / 1e6:,.1f} MB needed.",
            "Free space, or choose another place.",
        )


def publish_folder(folder: Path, out: OutputFolder) -> None:
    """Flush a folder with a manifest to the disk and give it its name, in place of what is there.

    Raises:
        UsageError: what is there is not rotor's to remove. OSError: the disk fails.
    """
    for place, _, files in os.walk(folder):
        for name in files:
            sync(Path(place) / name)
        sync(Path(place))
    if out.path.is_dir() and any(out.path.iterdir()):
        recover(out, but=folder)
        _exchange(folder, out)
    else:
        unmark(folder)
        os.rename(folder, out.path)  # an empty folder may be there
    sync(out.path.parent)


def _exchange(folder: Path, out: OutputFolder) -> None:
    """Replace a folder, which is kept until the new one is in its place."""
    out.check(overwrite=True, sources=())  # again: what has come into it since
    old = out.replaced
    unmark(folder)
    try:
        os.rename(out.path, old)
        os.rename(folder, out.path)
    except BaseException:  # also an interruption between the two
        if old.exists() and not out.path.exists():
            os.rename(old, out.path)
        raise
    with suppress(OSError):
        remove(old, out.kind)


def recover(out: OutputFolder, but: Path | None = None) -> None:
    """Remove what a killed process left of a folder; put the old one back if it was killed between two renames."""
    if out.replaced.exists() and not out.path.exists():
        os.rename(out.replaced, out.path)
        sync(out.path.parent)
    for path in (out.replaced, out.staging):
        if path.exists() and path != but:
            with suppress(UsageError):  # not rotor's: stays
                remove(path, out.kind)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file with the permissions of any new file; safetensors would allow its owner alone."""
    with path.open("wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    save_file(contiguous, path, metadata={"format": "pt"})
    path.chmod(mode)
