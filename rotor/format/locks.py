"""One process at a time on a run folder or an output folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UsageError

MAX_BYTES = 1 << 16
"""A lock file is smaller."""


@contextmanager
def exclusive(folder: Path, command: str) -> Iterator[None]:
    """Hold a folder for the length of a `with`; it need not exist yet.

    Two things are locked: a file beside the folder, which may come, go and be replaced as a whole; and the folder
    itself where there is one, so that neither a bind mount nor a user who may not write beside it goes past the lock.
    The system lets go of both when their holder ends in whatever way: the file of a killed process is stale, and taken
    over.

    Args:
        command: what is being done, for the message that another process gets.
    Raises:
        UsageError: another process holds it; says which; or it lies below a file.
        CheckpointError: the lock file cannot be written, or what has
            its name is none.
    """
    path = lock_path(folder)
    with ExitStack() as held:
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                file = next(above for above in path.parents if above.exists())
                raise UsageError(f"{folder}: {file} is no folder.", "Choose another place.") from error
            descriptor = _lock_file(path, held, needed=not folder.is_dir())
            _lock_folder(folder, held, alone=descriptor is None)
            if descriptor is not None:
                _sign(descriptor, command)
        except BlockingIOError as error:
            raise UsageError(
                f"{folder}: in use by {_holder(path)}.", "Wait until it has finished, or choose another folder."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written ({error.strerror}).", "Choose another place.") from error
        yield


def lock_path(folder: Path) -> Path:
    """Beside the folder. Links are followed, so that a folder has one lock by whatever name it is called."""
    folder = Path(os.path.realpath(folder))
    return folder.parent / f".{folder.name}.rotor-lock"


def _lock_file(path: Path, held: ExitStack, needed: bool) -> int | None:
    """A locked descriptor of the file; None where it cannot be made, in a folder that this user may not write to.

    Args:
        needed: there is nothing else to lock: that it cannot be made is an error.
    Raises:
        BlockingIOError: another process has it. CheckpointError: it is not a lock file.
    """
    while True:
        try:
            descriptor = _open(path)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM) and not needed:
                return None
            raise
        with ExitStack() as opened:
            opened.callback(os.close, descriptor)
            _check_ours(path, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                held.push(opened.pop_all())
                held.callback(_unlink, path)
                return descriptor
        # Its last holder has removed the file in between: try the one that is there now.


def _open(path: Path) -> int:
    """A descriptor of the file, made if there is none: never through a link, waiting for nobody, emptying nothing."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        try:
            return os.open(path, os.O_RDWR | flags)
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags)  # another user's, whose lock can still be waited for
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _not_ours(path) from error
            raise
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
    except FileExistsError:
        return _open(path)


def _check_ours(path: Path, descriptor: int) -> None:
    """Raises CheckpointError unless it is a plain file, of one name, that is empty or says what it is."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_size > MAX_BYTES:
        raise _not_ours(path)
    content = os.pread(descriptor, MAX_BYTES, 0)
    if content and not _parse(content):
        raise _not_ours(path)


def _not_ours(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: is not a lock that rotor wrote.", "Remove it, or choose another folder.")


def _lock_folder(folder: Path, held: ExitStack, alone: bool) -> None:
    """Lock the folder itself, if it is there.

    Args:
        alone: there is no lock file, so that nothing else keeps others away.
    """
    try:
        descriptor = os.open(os.path.realpath(folder), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        if alone:
            raise
        return
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems lock only what is open for writing
        if alone:
            raise


def _sign(descriptor: int, command: str) -> None:
    """Say in the lock file who holds it; another user's file stays as it is."""
    holder = {"pid": os.getpid(), "host": platform.node(), "command": command, "since": time.strftime("%F %T")}
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _unlink(path: Path) -> None:
    with suppress(OSError):  # another user's file in a folder such as /tmp
        path.unlink()


def _holder(path: Path) -> str:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            holder = _parse(os.pread(descriptor, MAX_BYTES, 0))
        finally:
            os.close(descriptor)
        if holder:
            return f"process {holder['pid']} on {holder['host']} (rotor {holder['command']}, since {holder['since']})"
    return "another process"


def _parse(content: bytes) -> dict[str, Any]:
    """What a lock file says of its holder; nothing if it is something else."""
    try:
        holder = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    expected = {"pid", "host", "command", "since"}
    return holder if isinstance(holder, dict) and holder.keys() == expected else {}
