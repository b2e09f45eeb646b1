"""Folders in which whole commands are run with drawn arguments, and what has to hold after each."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rotor import cli
from rotor.format.manifest import Manifest

EXIT_CODES = {0, 1, 2, 3, 130}
SECONDS = 600
"""A command takes few, more on a busy machine; one that waits for a pipe is ended, and fails the test."""


@dataclass(frozen=True)
class Done:
    """What a command did: its exit code, and what it said."""

    code: int
    out: str
    err: str


class World:
    """A fresh copy of the template, in which one example happens."""

    def __init__(self, template: Path) -> None:
        self._holder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self.root = Path(os.path.realpath(self._holder.name)) / "world"
        shutil.copytree(template, self.root, symlinks=True)

    def close(self) -> None:
        self._holder.cleanup()

    def state(self) -> dict[str, str]:
        """Kind, permissions and content of everything in it."""
        found = {}
        for place, folders, files in os.walk(self.root):
            for name in (*folders, *files):
                path = os.path.join(place, name)
                found[os.path.relpath(path, self.root)] = state_of(path)
        return found

    def run(self, arguments: Sequence[str], encoding: str = "utf-8") -> Done:
        """A command in this process, in the world's folder."""
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
        before = sys.argv, sys.stdout, sys.stderr, os.getcwd()
        sys.argv, (sys.stdout, sys.stderr) = ["rotor", *arguments], streams
        os.chdir(self.root)
        try:
            with limited(SECONDS):
                cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.argv, sys.stdout, sys.stderr = before[:3]
            os.chdir(before[3])
        out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)  # type: ignore[attr-defined]
        return Done(code, out, err)


def state_of(path: str) -> str:
    found = os.lstat(path)
    kind = f"{stat.S_IFMT(found.st_mode):o}-{stat.S_IMODE(found.st_mode):o}"
    if stat.S_ISLNK(found.st_mode):
        return f"{kind} {os.readlink(path)}"
    if not stat.S_ISREG(found.st_mode):
        return kind
    with open(path, "rb") as file:
        return f"{kind} {hashlib.sha256(file.read()).hexdigest()}"


class TooSlow(BaseException):
    """A command that does not end."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def fresh(template: Path) -> Iterator[World]:
    world = World(template)
    try:
        yield world
    finally:
        world.close()


def check(world: World, before: dict[str, str], done: Done, target: str | None, kind: str, may_replace: bool) -> None:
    """The invariants.

    Args:
        target: what the command was told to write, if anything. kind: of folder.
        may_replace: it was told to replace what is there.
    """
    assert done.code in EXIT_CODES, done
    for text in ("Traceback", "A defect of rotor's", "Exception ignored"):
        assert text not in done.err, done.err
    if done.code and not done.out:
        assert done.err.startswith("error: ") or "\nerror: " in done.err or "Usage:" in done.err, done.err
    after = world.state()
    out = None if target is None else os.path.relpath(os.path.realpath(world.root / target), world.root)
    outside = out is None or out in (".", "..") or out.startswith("../")
    own = set() if outside else {out}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or is_own(name, own, kind):
            continue
        raise AssertionError(f"{name}: was {before.get(name)}, is {after.get(name)}; told to write {target!r}: {done}")
    if out is None or not own:
        return
    old, new = (_below(state, out) for state in (before, after))
    assert may_replace or old.items() <= new.items(), (target, done)
    assert done.code or new, (target, done)
    if new and new != old:
        problems = Manifest.read(world.root / out).problems()
        assert not problems, (problems, done)


def _below(state: dict[str, str], folder: str) -> dict[str, str]:
    return {name: what for name, what in state.items() if name.startswith(f"{folder}/")}


def is_own(name: str, own: set[str], kind: str) -> bool:
    """Whether a command that writes to `own` may make, change or remove something.

    That is OUT, folders above it that were not there, an unfinished run, staging folders and locks; of RUN its log,
    its report and what is measured.
    """
    if (
        re.fullmatch(r"\.run\.rotor-lock|run/(log\.txt|report\.html|(tables|probes)(/.*)?)", name)
        and kind == "checkpoint"
    ):
        return True
    for out in own:
        beside, last = os.path.split(out)
        if name == out or name.startswith(f"{out}/") or out.startswith(f"{name}/"):
            return True
        first = os.path.relpath(name, beside or ".").split("/")[0]
        if kind == "run" and first == f"{last}.partial":
            return True
        if re.fullmatch(re.escape(f".{last}.rotor-") + "([0-9a-f]{16}(-old)?|lock)", first):
            return True
    return False
