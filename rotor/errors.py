"""The errors that rotor raises for a user's input, a model's files or an unmet target.

A message says what, where (file, tensor, layer), got against expected, and what to do next. On the command line an
error is two lines and the exit code of its class, never a traceback (unless ROTOR_DEBUG=1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MAX_CHARACTERS = 2000


class RotorError(Exception):
    """Base of every error that rotor raises on purpose.

    Args:
        message: what is wrong and where, got against expected.
        hint: what to do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = _printable(message), _printable(hint)
        super().__init__(f"{self.message}\n{self.hint}" if hint else self.message)


def _printable(text: str) -> str:
    """Text as one line of bounded length without control characters: parts may come from a file of unknown origin."""
    line = "".join(c if c.isprintable() else " " for c in text[: 2 * MAX_CHARACTERS])
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 3]}..."


@contextmanager
def system_errors() -> Iterator[None]:
    """Turn errors of the operating system into a RotorError; errors in the code stay what they are."""
    try:
        yield
    except Exception as error:
        translated = from_system(error)
        if translated is None:
            raise
        raise translated from error


HINT = "Check permissions, free space and limits (ulimit), or choose another place."


def from_system(error: Exception) -> RotorError | None:
    """Translate an error of the operating system, of memory or of an encoding; None for any other error.

    Libraries have other classes for the same errors: torch raises RuntimeError when memory is short, safetensors an
    error that quotes the system's message.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text:
        hint = "Give it more memory; --offload always and a smaller --batch-tokens take less."
        return RotorError(f"out of memory: {text or type(error).__name__}"[:300], hint)
    if isinstance(error, OSError):
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        place = f"{' -> '.join(names)}: " if names else ""
        return RotorError(f"{place}{error.strerror or text or type(error).__name__}.", HINT)
    if isinstance(error, UnicodeError):
        return RotorError(f"a name or a text is not in the expected encoding: {text}"[:300], "Use UTF-8.")
    if type(error).__name__ == "SafetensorError":
        return RotorError(f"a safetensors file could not be read or written: {text}"[:300], HINT)
    return None


class UsageError(RotorError):
    """The request itself cannot be carried out: contradicting options, an output folder that must not be written."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe, an override of one of its fields, or a device that it names, is not valid."""


class UnsupportedModelError(RotorError):
    """The model's family, or a property of it, is not supported."""


class CheckpointError(RotorError):
    """A checkpoint or run folder is missing, incomplete, damaged or of a kind that rotor refuses."""


class MissingError(CheckpointError, UsageError):
    """A folder that the request names is not there."""

    exit_code = UsageError.exit_code


class NumericsError(RotorError):
    """A tensor is not finite, or a factorisation cannot be computed from what was measured."""


class DataError(RotorError):
    """Calibration tokens or evaluation text are missing or too few."""


class Interrupted(RotorError):
    """Ctrl-C, or a request to end; says how to go on."""

    exit_code = 130


class AccuracyError(RotorError):
    """The accuracy that was asked for cannot be reached, or is not met."""

    exit_code = 3
