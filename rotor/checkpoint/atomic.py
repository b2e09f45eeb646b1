"""Single files that appear whole or not at all, and are still there after a power loss."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .json_files import json_text


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to; it is renamed to `path` when the `with` ends well, else removed.

    The content is on the disk before the new name is, and the name before the `with` is left. The writer holds the
    lock of the folder, so the temporary name need not be unique: what a killed process left there is replaced.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # never through a link
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent.resolve())  # what a user calls a folder may be a link to it
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, data: object) -> None:
    write_text(path, f"{json_text(data)}\n")


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; some network file systems cannot do that for a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
