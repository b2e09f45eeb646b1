"""One process at a time on a run folder or an output folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import CheckpointError, UsageError


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder, which need not exist yet, for the length of a `with`.

    The lock of a process that has ended, in whatever way, is taken over. Where no file can be written beside the
    folder, nothing can be published either, and no lock is held.

    Raises:
        UsageError: another process holds it, or it lies below a file.
        CheckpointError: the lock file cannot be written, or something else has its name.
    """
    path = lock_path(folder)
    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (FileExistsError, NotADirectoryError) as error:
        file = next(above for above in path.parents if above.exists())
        raise UsageError(f"{folder}: {file} is no folder.", "Choose another place.") from error
    except Timeout as error:
        raise UsageError(
            f"{folder}: in use by another process.", "Wait until it has finished, or choose another folder."
        ) from error
    except OSError as error:
        if not (folder.is_dir() and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)):
            raise CheckpointError(f"{path}: cannot be written ({error.strerror}).", "Choose another place.") from error
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                path.unlink()
            lock.release()


def lock_path(folder: Path) -> Path:
    """Path of the lock file, beside the folder. Links are followed, so that all names of a folder share one lock."""
    folder = Path(os.path.realpath(folder))
    return folder.parent / f".{folder.name}.rotor-lock"
