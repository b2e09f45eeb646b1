"""The `rotor` command. The only package of rotor that prints; everything else is in the library.

This module has the entry point and imports nothing large, so that an interruption finds it ready from the start.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import Interrupted, RotorError


def main() -> None:
    """Entry point: an error of rotor's is two lines on stderr and its exit code; ROTOR_DEBUG=1 shows the traceback."""
    for library in ("transformers", "lm_eval"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with _terminable():
            from .commands import app

            app()
    except KeyboardInterrupt:
        _fail(Interrupted("interrupted.", "Nothing was begun; give the same command again."))
    except RotorError as error:
        if os.environ.get("ROTOR_DEBUG"):
            raise
        _fail(error)


def is_first_process() -> bool:
    """Of those that torchrun started; the others are silent."""
    return os.environ.get("RANK", "0") == "0"


def _fail(error: RotorError) -> None:
    exec("")  # else Python, interrupted in an exec of some library, would end by SIGINT instead of with the exit code
    if is_first_process() or not isinstance(error, Interrupted):
        print(f"error: {error.message}", file=sys.stderr)
        print(f"  {error.hint or 'Set ROTOR_DEBUG=1 for a traceback.'}", file=sys.stderr)
    sys.exit(error.exit_code)


@contextmanager
def _terminable() -> Iterator[None]:
    """A request to end (SIGTERM) is like Ctrl-C: what is half done is removed, what is done is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _interrupt)}
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
