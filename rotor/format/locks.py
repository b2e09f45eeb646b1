"""One process at a time on a run folder or an output folder.

Not filelock: its lock file is emptied before it is locked, so that nobody could say who holds it, and whatever has its
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
    itself where there is one, for whoever reaches it by a bind mount or may not write beside it. The system lets go of
    both when their holder ends in whatever way: the file of a killed process is taken over.

    Args:
        command: what is being done, for the message that another process gets.
    Raises:
        UsageError: another process holds it; says which; or it lies below a file.
        CheckpointError: the lock file cannot be written, or something else has its name.
    """
    path = lock_path(folder)
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            has_file = _lock_file(path, held, command, needed=not folder.is_dir())
            _lock_folder(folder, held, needed=not has_file)
        except (FileExistsError, NotADirectoryError) as error:
            file = next(above for above in path.parents if above.exists())
            raise UsageError(f"{folder}: {file} is no folder.", "Choose another place.") from error
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


def _lock_file(path: Path, held: ExitStack, command: str, needed: bool) -> bool:
    """Lock the file, and write into it who holds it; False where it cannot be made and is not needed.

    Raises:
        BlockingIOError: another process has it. CheckpointError: it is not a lock file.
    """
    while True:
        try:
            descriptor = _open(path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _not_ours(path) from error
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM) and not needed:
                return False
            raise
        with ExitStack() as opened:
            opened.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            plain = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and found.st_size <= MAX_BYTES
            if not plain or (found.st_size and not _parse(os.pread(descriptor, MAX_BYTES, 0))):
                raise _not_ours(path)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(found, os.stat(path)):
                held.push(opened.pop_all())
                held.callback(_try, path.unlink)
                break
        # Its last holder has removed the file in between: try the one that is there now.
    holder = {"pid": os.getpid(), "host": platform.node(), "command": command, "since": time.strftime("%F %T")}
    if _try(os.ftruncate, descriptor, 0):
        _try(os.pwrite, descriptor, json.dumps(holder).encode(), 0)
    return True


def _open(path: Path) -> int:
    """A descriptor of the file, made if there is none: never through a link, waiting for nobody, emptying nothing."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | flags)  # another user's, whose lock can still be waited for
        raise


def _not_ours(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: is not a lock that rotor wrote.", "Remove it, or choose another folder.")


def _lock_folder(folder: Path, held: ExitStack, needed: bool) -> None:
    """Lock the folder itself, if it is there; some network file systems lock only what is open for writing."""
    try:
        descriptor = os.open(os.path.realpath(folder), os.O_RDONLY | os.O_DIRECTORY)
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        if needed:
            raise


def _try(function: Any, *arguments: Any) -> bool:
    """Whether it succeeds: another user's file in a folder such as /tmp can be locked, not changed."""
    with suppress(OSError):
        function(*arguments)
        return True
    return False


def _holder(path: Path) -> str:
    """Who holds a lock file, in words."""
    with (
        suppress(OSError),
        open(path, "rb", opener=lambda name, _: os.open(name, os.O_NOFOLLOW | os.O_NONBLOCK)) as file,
    ):
        holder = _parse(file.read(MAX_BYTES))
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
