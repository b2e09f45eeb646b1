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
    """Whether this is the first of the processes that torchrun started; the others are silent."""
    return os.environ.get("RANK", "0") == "0"


def printable(text: str) -> str:
    """Text as it may go to a terminal: what is neither printable nor a line's end is escaped.

    Part of it may come from a file of unknown origin, and a terminal obeys escape sequences.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class Lines(logging.Formatter):
    """Lines of a log, one a record, with nothing in them that a terminal would act on."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", r"\n")


@contextmanager
def log_file(folder: Path, command: str) -> Iterator[None]:
    """Append the messages of the logger `rotor` to the folder's log.txt, and how the work ended.

    The folder may be renamed in the meantime; the file goes with it. In a folder that is only read no log is kept.
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
        """Write to the file alone: on the terminal the command line says it in its own words."""
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
