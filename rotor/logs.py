"""Messages about the work: the logger `rotor`, and the log file in the folder that a command writes to."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("rotor")
LOG = "log.txt"


def is_first_process() -> bool:
    """Tell whether this is the first process of those that torchrun started; the others print nothing."""
    return os.environ.get("RANK", "0") == "0"


def printable(text: str) -> str:
    """Escape everything in a text that is neither printable nor a newline or tab.

    Part of the text may come from a file of unknown origin, and a terminal obeys escape sequences.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class Lines(logging.Formatter):
    """Format each record as one line that is safe to print on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", r"\n")


@contextmanager
def log_file(folder: Path, command: str) -> Iterator[None]:
    """Append the messages of the logger `rotor` to the folder's log.txt, and how the work ended.

    The folder may be renamed meanwhile; the open file moves with it. A folder that is not writable gets no log.
    """
    try:
        handler = logging.FileHandler(folder / LOG, encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        log.info("no log is kept: %s: %s", folder / LOG, error.strerror)
        yield
        return
    handler.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    arguments = shlex.join(sys.argv[1:])

    def note(level: int, text: str) -> None:
        """Write to the file alone; the command line prints its own message."""
        handler.handle(log.makeRecord(log.name, level, __file__, 0, f"{command} {text}", (), None))

    try:
        note(logging.INFO, f"begins ({arguments})")
        yield
        note(logging.INFO, "has finished")
    except BaseException as error:
        note(logging.ERROR, f"ended by {type(error).__name__}: {' '.join(str(error).split())}")
        raise
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
