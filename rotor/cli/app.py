"""The application that the commands belong to, and its errors."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from ..errors import Interrupted, MissingError, UsageError
from ..options import MAX_NUMBER
from ..versions import __version__, documentation
from .console import stdout
from .options import with_options

CLICK_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Click's UsageError, of which newer versions of Typer have a copy."""


@contextmanager
def resumable(how: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into an error that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted.", how()) from None


@contextmanager
def _in_two_lines() -> Iterator[None]:
    """Turn an interruption, and Typer's complaints about options and arguments, into errors like others.

    A bare `rotor` still shows its help.
    """
    try:
        with resumable(lambda: "No partial output was left; give the same command again."):
            yield
    except CLICK_USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        command = error.ctx.command_path if error.ctx else "rotor"
        message = " ".join(error.format_message().split()).removesuffix(".")
        hint = f"`{command} --help` has an example."
        percentages = [match for text in sys.argv if (match := re.search(r"^(?:--\S+=)?(\d+(?:\.\d+)?)%$", text))]
        if percentages and "number" in message:
            hint = f"Did you mean {float(percentages[0][1]) / 100:g}?"
        raise UsageError(f"{message[:1].lower()}{message[1:]}.", hint) from None


class Commands(typer.core.TyperGroup):
    """The commands, whose errors are RotorErrors."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        with _in_two_lines():
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: Any) -> Any:
        with _in_two_lines():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_NUMBER},  # the terminal's
    help="Shrink the KV cache of a decoder-only language model along its hidden dimension, at a stated accuracy.",
    epilog="Exit codes: 0 done; 1 a model, a file or the data is bad; 2 the request is bad; 3 the accuracy cannot be "
    "reached or is not met; 130 interrupted (Ctrl-C or SIGTERM). Each command has --help with an example. "
    f"Documentation: {documentation()}",
    rich_markup_mode=None,
)


def command(*, epilog: str, name: str | None = None, **context: Any) -> Callable[[Callable[..., None]], Any]:
    """Add a command to the application; see with_options for what its parameters may be."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        summary = (function.__doc__ or "").partition("\n\n")[0]
        return app.command(name, epilog=epilog, short_help=summary, context_settings=context)(with_options(function))

    return register


def _version(value: bool) -> None:
    if value:
        print(f"rotor {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""
    stdout.quiet = False


def check_folder(folder: Path) -> None:
    """Raises MissingError where there is none."""
    if not folder.is_dir():
        said = "is a file" if folder.exists() else "no such folder"
        raise MissingError(f"{folder}: {said}.", "Give a folder that `rotor export` wrote.")


def command_line() -> str:
    """The command line as the user gave it, for records."""
    return shlex.join(["rotor", *sys.argv[1:]])
