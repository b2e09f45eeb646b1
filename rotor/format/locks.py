"""One process at a time on a run folder or an output folder.

Not filelock, whose lock file is emptied before it is locked: nobody could say who holds it, and whatever else has its
name would lose its content.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, UsageError

FIELDS = ("pid", "host", "command", "since")
"""Of who holds a lock, as its file has them."""

MAX_BYTES = 1 << 16
"""A lock file is smaller."""


@contextmanager
def exclusive(folder: Path, command: str) -> Iterator[None]:
    """Hold a folder for the length of a `with`; it need not exist yet.

    The system lets go of a file beside it when its holder ends in whatever way: that of a killed process is taken over.
    Where no file can be made there, the folder itself is locked.

    Args:
        command: what is being done, for the message that another process gets.
    Raises:
        UsageError: another process holds it; says which; or it lies below a file.
        CheckpointError: the lock file cannot be written, or something else has its name.
    """
    path = lock_path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path, folder)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(above for above in path.parents if above.exists())
        raise UsageError(f"{folder}: {file} is no folder.", "Choose another place.") from error
    except BlockingIOError as error:
        raise UsageError(
            f"{folder}: in use by {_holder(path)}.", "Wait until it has finished, or choose another folder."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}).", "Choose another place.") from error
    try:
        with suppress(OSError):  # another user's file, or the folder, can be locked but not written to
            os.ftruncate(descriptor, 0)
            values = (os.getpid(), platform.node(), command, time.strftime("%F %T"))
            os.pwrite(descriptor, json.dumps(dict(zip(FIELDS, values, strict=True))).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def lock_path(folder: Path) -> Path:
    """Beside the folder. Links are followed, so that a folder has one lock by whatever name it is called."""
    folder = Path(os.path.realpath(folder))
    return folder.parent / f".{folder.name}.rotor-lock"


def _locked(path: Path, folder: Path) -> int:
    """A descriptor that is locked; raises BlockingIOError where another process has it."""
    while True:
        descriptor = _open(path, folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened = os.fstat(descriptor)
            if any(place.exists() and os.path.samestat(opened, place.stat()) for place in (path, folder)):
                return descriptor
            os.close(descriptor)  # its last holder has removed the file in between
        except BaseException:
            os.close(descriptor)
            raise


def _open(path: Path, folder: Path) -> int:
    """A descriptor of the lock file, made if there is none: never through a link, waiting for nobody, emptying nothing.

    Raises:
        CheckpointError: it is not a lock file.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    foreign = CheckpointError(f"{path}: is not a lock that rotor wrote.", "Remove it, or choose another folder.")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise foreign from error
        if error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM) or not (path.exists() or folder.is_dir()):
            raise
        return os.open(path if path.exists() else os.path.realpath(folder), os.O_RDONLY | flags)
    found = os.fstat(descriptor)
    plain = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and found.st_size <= MAX_BYTES
    if not plain or (found.st_size and not _parse(os.pread(descriptor, MAX_BYTES, 0))):
        os.close(descriptor)
        raise foreign
    return descriptor


def _holder(path: Path) -> str:
    """Who holds a lock file, in words."""
    with suppress(OSError):
        holder = _parse(path.read_bytes())
        if holder:
            return "process {pid} on {host} (rotor {command}, since {since})".format(**holder)
    return "another process"


def _parse(content: bytes) -> dict[str, object]:
    """What a lock file says of its holder; nothing if it is something else."""
    with suppress(ValueError, RecursionError):
        holder = json.loads(content)
        if isinstance(holder, dict) and holder.keys() == set(FIELDS):
            return holder
    return {}
