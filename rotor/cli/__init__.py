"""The `rotor` command. The only package of rotor that prints; everything else is in the library.

This module has the entry point and imports nothing large, so that an interruption finds it ready from the start.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ..errors import Interrupted, RotorError, from_system
from ..logs import is_first_process

DEFECT = "A defect of rotor's: please report it, with the traceback that ROTOR_DEBUG=1 shows."
INTERRUPTED = Interrupted("interrupted.", "Nothing was begun; give the same command again.")
HELP = "`rotor --help` lists the commands; each has --help with an example."


def main() -> None:
    """Entry point: any error is two lines on stderr and an exit code; ROTOR_DEBUG=1 shows the traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - to the end of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")  # of Triton's own future, once for each compilation
    for library in ("transformers", "lm_eval"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with _terminable():
            from .commands import app

            try:
                app()
            finally:
                sys.stdout.flush()  # what cannot be written is an error, while that can still be said
    except KeyboardInterrupt:
        _fail(INTERRUPTED)
    except Exception as error:
        if os.environ.get("ROTOR_DEBUG"):
            raise
        said = error if isinstance(error, RotorError) else INTERRUPTED if _interrupted else from_system(error)
        text = " ".join(str(error).split())
        _fail(said or RotorError(f"unexpected {type(error).__name__}: {text}", DEFECT))


def _fail(error: RotorError) -> None:
    if is_first_process() or not isinstance(error, Interrupted):
        with suppress(OSError):  # the terminal is gone, or the disk behind a redirection full
            sys.stderr.write(f"error: {error.message}\n  {error.hint or HELP}\n")
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:  # else Python tries again at its end, and ends with a message and an exit code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.exit(error.exit_code)


@contextmanager
def _terminable() -> Iterator[None]:
    """A request to end (SIGTERM, or SIGHUP of a closed terminal) is like Ctrl-C: what is half done is removed, what is
    done is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    plain = (signal.SIG_DFL, signal.default_int_handler)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _interrupt) for number in numbers if signal.getsignal(number) in plain}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


_interrupted: list[int] = []
"""Signals that asked for the end: a library that an import interrupts may raise something else in its place."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.append(number)
    raise KeyboardInterrupt
