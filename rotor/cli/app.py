"""The application that the commands belong to, and the options that several of them have."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from ..errors import Interrupted, MissingError, UsageError
from ..format.json_files import json_text
from ..installing import documentation
from ..versions import __version__
from . import completion
from .console import stdout

MAX_NUMBER = 1 << 30
LONGEST_SUMMARY = 1000
UNTOUCHED = "Nothing was written half; give the same command again."


@contextmanager
def resumable(how: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C becomes an error that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted.", how()) from None


CLICK_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Click's UsageError, of which newer versions of Typer have a copy."""


@contextmanager
def _in_two_lines() -> Iterator[None]:
    """What Typer says of options and arguments becomes an error like others; a bare `rotor` still shows its help."""
    try:
        yield
    except CLICK_USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        command = error.ctx.command_path if error.ctx else "rotor"
        message = " ".join(error.format_message().split()).removesuffix(".")
        raise UsageError(f"{message[:1].lower()}{message[1:]}.", f"`{command} --help` has an example.") from None


class Commands(typer.core.TyperGroup):
    """The commands; one that is interrupted says so, with its exit code."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        with resumable(lambda: UNTOUCHED), _in_two_lines():
            return super().make_context(*arguments, **keywords)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As Typer does, but with whole summaries: the formatter breaks lines."""
        named = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(LONGEST_SUMMARY)) for name, command in named if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        with resumable(lambda: UNTOUCHED), _in_two_lines():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_NUMBER},  # the terminal's
    help="Shrink the KV cache of a decoder-only language model along its hidden dimension, at a stated accuracy.",
    epilog="Exit codes: 0 done, 1 a model, a file or the data is bad, 2 the request is, 3 the accuracy cannot be "
    "reached or is not met, 130 interrupted (Ctrl-C or SIGTERM). Each command has --help with an example. "
    f"Documentation: {documentation()}",
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(help="Folder of the model (config.json and safetensors), or a hub id.")]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint that `rotor export` wrote.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
RecipeOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe field (`rotor recipes --fields` has all of them); may be repeated.",
        autocompletion=completion.settings,
    ),
]
OwnText = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="Text of your own (a UTF-8 file or a folder of them) to calibrate on and to judge accuracy on; its "
        "documents are dealt to three splits that share none: calibration, search, report. Without it the recipe's "
        "tokens calibrate, and source of Python's standard library judges (evaluation.source=stdlib).",
    ),
]
Device = Annotated[
    str,
    typer.Option(help="auto (the GPU if there is one), cpu, cuda or cuda:N.", autocompletion=completion.devices),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (float32 on a CPU), float32, bfloat16 or float16.",
        autocompletion=completion.one_of(("auto", "float32", "bfloat16", "float16")),
    ),
]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens in one forward pass of a calibration.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty output folder.")]
Offload = Annotated[
    str,
    typer.Option(
        metavar="WHEN",
        help="Whether to read weights from disk layer by layer: auto (if they do not fit in memory), always or never.",
        autocompletion=completion.one_of(("auto", "always", "never")),
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(metavar="MAP", help="auto spreads the model over several GPUs; needs the package accelerate."),
]
TargetDevice = Annotated[
    str | None,
    typer.Option(
        help="Device whose decode time is predicted, e.g. h200 (rotor/prediction/devices.yaml).",
        autocompletion=completion.target_devices,
    ),
]
DeviceFile = Annotated[Path | None, typer.Option(help="YAML with further devices.")]
SourceModel = Annotated[Path | None, typer.Option(help="Source model, if it is not where it was.")]
CachePolicy = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="NAME",
        help="How the cache is kept: none, a bundled policy (see `rotor recipes`), or a YAML file; default: the "
        "checkpoint's own.",
        autocompletion=completion.cache_policies,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and what --json prints.")]
QuietText = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the text itself.")]
NoMeasure = Annotated[
    bool,
    typer.Option("--no-measure", help="Leave accuracy unmeasured; of an export, with --compression or --removal-rate."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and what it takes; write nothing.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also tell how long each stage takes.")]


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
    """What the user gave, for records."""
    return shlex.join(["rotor", *sys.argv[1:]])


def print_json(data: Any) -> None:
    print("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in json_text(data)))


def split(names: str) -> list[str]:
    """`a, b` as a list."""
    return [name.strip() for name in names.split(",") if name.strip()]


def numbers(option: str, text: str) -> list[int]:
    """`1,8`; raises UsageError unless they are positive whole numbers."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and item.isascii() and 0 < int(item) <= MAX_NUMBER for item in items):
        raise UsageError(f"{option} {text}: expected whole numbers from 1 to {MAX_NUMBER}.", f"Example: {option} 1,8")
    return list(dict.fromkeys(int(item) for item in items))


def shares(option: str, text: str | None) -> tuple[float, ...]:
    """`0.99,0.95`, or nothing; raises UsageError unless they are numbers."""
    try:
        return tuple(dict.fromkeys(float(item) for item in split(text or "")))
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers.", f"Example: {option} 0.99,0.95") from None


def check_results(*files: Path | None) -> None:
    """Raises UsageError where one of these files, of those that were asked for, cannot be written."""
    from ..format.places import check_file

    for path in files:
        if path is not None:
            check_file(path)
