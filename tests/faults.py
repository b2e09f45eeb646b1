"""Faults at chosen system calls: what Python opens, writes, flushes, renames, removes and makes below a folder.

Most calls are seen by an audit hook, which also those see that C code makes for Python (rmtree, copyfile); writes and
flushes, which raise no audit event, by wrappers of the functions themselves.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rotor.format import publishing

KINDS = ("read", "open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir")
"""read: opening a file to read it, or listing a folder. open: opening one to write it."""

ERRORS = {
    "read": (errno.EACCES, errno.EIO, errno.EMFILE),
    "open": (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EXDEV, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EBUSY),
    "unlink": (errno.EACCES, errno.EIO, errno.EROFS),
    "mkdir": (errno.ENOSPC, errno.EACCES, errno.EROFS),
    "rmdir": (errno.EACCES, errno.EBUSY),
}
EVENTS = {
    "os.listdir": "read",
    "os.scandir": "read",
    "os.rename": "rename",
    "os.remove": "unlink",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.truncate": "write",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass
class Faults:
    """What goes wrong, and when.

    folder: only calls on paths below it count. kinds: which calls count. at: how many of them go well first.
    error: the errno; or KeyboardInterrupt or MemoryError, which are raised in its place.
    lasting: all calls that count fail from then on, as on a full disk; else only one does. seen: calls by kind.
    """

    folder: Path
    kinds: frozenset[str]
    at: int
    error: int | type[BaseException]
    lasting: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    raised: int = 0
    _inside: threading.local = field(default_factory=threading.local)

    def call(self, kind: str, path: object) -> None:
        """Count a call; raises what is due at it."""
        if kind not in self.kinds or not self._counts(path):
            return
        self.seen[kind] += 1
        if self.seen.total() <= self.at or (self.raised and not self.lasting):
            return
        if not isinstance(self.error, int):
            if threading.current_thread() is threading.main_thread():  # where Python raises them
                self.raised += 1
                raise self.error
            return
        self.raised += 1
        raise OSError(self.error, os.strerror(self.error), os.fsdecode(path) if isinstance(path, (str, bytes)) else "")

    def _counts(self, path: object) -> bool:
        if isinstance(path, int) and not isinstance(path, bool):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        if not isinstance(path, (str, bytes)):
            return False
        name = os.fsdecode(path)
        return not os.path.isabs(name) or name.startswith(str(self.folder))  # relative: rmtree's, below a descriptor


_active: list[Faults] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event == "open":
        path, _, flags = arguments
        _active[-1].call("open" if isinstance(flags, int) and flags & WRITING else "read", path)
    elif event in EVENTS and arguments:
        _active[-1].call(EVENTS[event], arguments[0])


_hooked: list[bool] = []


@contextmanager
def injected(faults: Faults) -> Iterator[Faults]:
    """Let them happen in the body of a `with`."""
    if not _hooked:
        sys.addaudithook(_audit)  # stays for the life of the process, and does nothing outside of this
        _hooked.append(True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "pwrite", "sendfile", "ftruncate"):
            _wrap(patch, os, name, "write", faults)
        _wrap(patch, os, "fsync", "fsync", faults)
        opened = _opening(io.open, faults)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        save = publishing.save_file

        def saved(tensors: Any, path: Path, metadata: Any = None) -> None:
            faults.call("write", path)  # safetensors writes by itself, where nobody can look on
            save(tensors, path, metadata=metadata)

        patch.setattr(publishing, "save_file", saved)
        _active.append(faults)
        try:
            yield faults
        finally:
            _active.pop()


def _wrap(patch: pytest.MonkeyPatch, module: Any, name: str, kind: str, faults: Faults) -> None:
    function: Callable[..., Any] = getattr(module, name)

    def wrapped(descriptor: Any, *arguments: Any, **keywords: Any) -> Any:
        faults.call(kind, descriptor)
        return function(descriptor, *arguments, **keywords)

    patch.setattr(module, name, wrapped)


def _opening(real: Callable[..., Any], faults: Faults) -> Callable[..., Any]:
    """`open`, whose files can fail when they are written to."""

    class Raw(io.FileIO):
        def write(self, data: Any) -> int | None:
            faults.call("write", self.name)
            return super().write(data)

    def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **more: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        if not writes or isinstance(file, int) or buffering == 0 or rest or more.get("opener"):
            return real(file, mode, buffering, encoding, *rest, **more)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        if "b" in mode:
            return buffered
        kept = {name: value for name, value in more.items() if name in ("errors", "newline")}
        return io.TextIOWrapper(buffered, encoding=encoding or "utf-8", **kept)

    return opened
