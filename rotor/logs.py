"""Messages about the work: the logger `rotor`, and the log file in the folder that a command writes to."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("rotor")
LOG = "log.txt"
FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")


@contextmanager
def log_file(folder: Path, command: str) -> Iterator[None]:
    """Append everything that the logger `rotor` is told to the folder's log.txt, and how the work ended.

    The folder may be renamed in the meantime; the file goes with it.
    """
    handler = logging.FileHandler(folder / LOG, encoding="utf-8")
    handler.setFormatter(FORMAT)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    arguments = shlex.join(sys.argv[1:])
    try:
        _note(handler, logging.INFO, f"{command} begins" + (f" ({arguments})" if arguments else ""))
        yield
        _note(handler, logging.INFO, f"{command} has finished")
    except BaseException as error:
        text = " ".join(str(error).split())
        _note(handler, logging.ERROR, f"{command} ended by {type(error).__name__}{': ' + text if text else ''}")
        raise
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


def _note(handler: logging.Handler, level: int, text: str) -> None:
    """A line in the file alone: on the terminal the command line says it in its own words."""
    handler.handle(log.makeRecord(log.name, level, __file__, 0, text, (), None))
