"""The errors that rotor raises for a user's input, a model's files or an unmet target.

A message says what, where (file, tensor, layer), got against expected, and what to do next. On the command line an
error is two lines and the exit code of its class, never a traceback (unless ROTOR_DEBUG=1).
"""

from __future__ import annotations


class RotorError(Exception):
    """Base of every error that rotor raises on purpose.

    Args:
        message: what is wrong and where, got against expected.
        hint: what to do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n{hint}")
        self.message = message
        self.hint = hint


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


class AccuracyError(RotorError):
    """The accuracy that was asked for cannot be reached, or is not met."""

    exit_code = 3
