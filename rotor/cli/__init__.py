"""The `rotor` command. The only package of rotor that prints; everything else is in the library.

This module has the entry point and imports nothing large, so that an interruption finds it ready from the start.
"""

from __future__ import annotations

import io
import logging
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import Interrupted, RotorError, UsageError, from_system
from ..logs import is_first_process, printable

DEFECT = "A defect of rotor's: please report it, with the traceback that ROTOR_DEBUG=1 shows."


def main() -> None:
    """Entry point: any error is two lines on stderr and an exit code; ROTOR_DEBUG=1 shows the traceback."""
    _prepare_streams()
    logging.setLogRecordFactory(PrintableRecord)
    warnings.formatwarning = _printable_warning
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")  # of Triton's own future, once for each compilation
    for library in ("transformers", "lm_eval"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with _terminable():
            from .commands import app

            with _reader_may_leave():
                try:
                    app()
                finally:
                    sys.stdout.flush()  # what cannot be said is an error, while it can still be told
    except KeyboardInterrupt:
        _fail(Interrupted("interrupted.", "Nothing was begun; give the same command again."))
    except Exception as error:
        if os.environ.get("ROTOR_DEBUG"):
            raise
        found = error if isinstance(error, RotorError) else from_system(error)
        text = " ".join(str(error).split())
        _fail(found or RotorError(f"unexpected {type(error).__name__}: {text}", DEFECT))


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Whoever reads stdout may have enough (`| head -1`): that ends rotor silently, as SIGPIPE ends other programs.

    Click makes an exit code of 1 of it.
    """
    try:
        yield
    except (BrokenPipeError, SystemExit) as error:
        poll = select.poll()
        poll.register(1, 0)
        if getattr(error, "code", 1) != 1 or not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)


class PrintableRecord(logging.LogRecord):
    """What any library logs may quote a file of unknown origin: nothing in it acts on the terminal."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def _printable_warning(*arguments: Any, _format: Any = warnings.formatwarning, **keywords: Any) -> str:
    """A warning as Python shows it, likewise."""
    return printable(_format(*arguments, **keywords))


def _fail(error: RotorError) -> None:
    exec("")  # else Python, interrupted in an exec of some library, would end by SIGINT instead of with the exit code
    if is_first_process() or not isinstance(error, Interrupted):
        lines = f"error: {error.message}\n  {error.hint or _what_to_do(error)}\n"
        with suppress(OSError):  # the terminal is gone, or the disk behind a redirection full
            sys.stderr.write(lines)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:  # else Python tries again at its end, and ends with a message and an exit code of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.exit(error.exit_code)


def _what_to_do(error: RotorError) -> str:
    """Where an error does not say it: a traceback tells nothing of a request or a file that is wrong."""
    if error.__cause__ is not None and not isinstance(error, UsageError):
        return "Set ROTOR_DEBUG=1 for a traceback."
    return "`rotor --help` lists the commands; each has --help with an example."


def _prepare_streams() -> None:
    """Let text that the terminal's encoding lacks be escaped, and let closed streams lead nowhere.

    A closed one must not stay closed: the next file that is opened would get its number, and what libraries print.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _terminable() -> Iterator[None]:
    """A request to end (SIGTERM, or SIGHUP of a closed terminal) is like Ctrl-C: what is half done is removed, what is
    done is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _interrupt)}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    """KeyboardInterrupt, but not while torch is being imported: its C++ code aborts on any exception then."""
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.__spec__, "_initializing", False):
        again = threading.Timer(0.1, signal.raise_signal, (number,))
        again.daemon = True
        again.start()
        return
    raise KeyboardInterrupt
