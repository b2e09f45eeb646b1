"""One process at a time on a run folder or an output folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError, UsageError


@contextmanager
def exclusive(folder: Path, command: str) -> Iterator[None]:
    """Hold a folder for the length of a `with`; it need not exist yet.

    The system lets go of the lock when its holder ends in whatever way, so a file that a killed process left behind is
    stale and simply taken over.

    Args:
        command: what is being done, for the message that another process gets.
    Raises:
        UsageError: another process holds it; says which. CheckpointError: the lock file cannot be written.
    """
    path = lock_path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path)
    except BlockingIOError as error:
        raise UsageError(
            f"{folder}: in use by {_holder(path)}.", "Wait until it has finished, or choose another folder."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}).", "Choose another place.") from error
    try:
        holder = {"pid": os.getpid(), "host": platform.node(), "command": command, "since": time.strftime("%F %T")}
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(holder).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def lock_path(folder: Path) -> Path:
    """Beside the folder, which may be replaced as a whole; where its parent is read-only, in the temporary folder.

    Links are followed, so that a folder has one lock by whatever name it is called.
    """
    folder = Path(os.path.realpath(folder))
    if folder.parent.is_dir() and not os.access(folder.parent, os.W_OK):
        return Path(tempfile.gettempdir()) / f"rotor-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.lock"
    return folder.parent / f".{folder.name}.rotor-lock"


def _acquire(path: Path) -> int:
    """A locked descriptor of `path`; raises BlockingIOError if another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has removed the file in between: try the one that is there now


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text("utf-8"))
        return f"process {holder['pid']} on {holder['host']} (rotor {holder['command']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
