"""The errors that rotor raises for a user's input, a model's files or an unmet target.

A message says what, where (file, tensor, layer), got against expected, and what to do next. On the command line an
error is two lines and the exit code of its class, never a traceback (unless ROTOR_DEBUG=1).
"""

from __future__ import annotations

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
    """One line of bounded length with no control characters: parts of it may come from a file of unknown origin."""
    line = "".join(c if c.isprintable() else " " for c in text[: 2 * MAX_CHARACTERS])
    return line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 3]}..."


class UsageError(RotorError):
    """The request itself cannot be carried out: contradicting options, an output folder that must not be written."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe, an override of one of its fields, or a device that it names, is not valid."""


class UnsupportedModelError(RotorError):
    """The model's family, or a property of it, is not supported."""


class CheckpointError(RotorError):
    """A checkpoint or run folder is missing, incomplete, damaged or of a kind that rotor refuses."""


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
