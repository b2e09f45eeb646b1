"""Options that several commands have: by name, and in groups."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from ..errors import UsageError
from ..options import MAX_NUMBER, described_fields, without_none
from ..progress import Progress
from .console import print_json, show_progress

NONE: Any = ()
"""The default of options that may be repeated."""

NEGATED = ("measure",)
"""Fields whose option says no."""

INTERNAL = ("progress", "shared", "command")
"""Fields of requests that are no options."""

HELP = {
    "folder": "A checkpoint that `rotor export` wrote.",
    "as_json": "Print one JSON document on stdout.",
    "quiet": "Print nothing but errors, and what --json or generate prints.",
    "verbose": "Print details too: seconds and memory of each stage, digests, and what else the log file has.",
}
"""Help text by parameter name, where neither a command's docstring nor a request's has one."""

NAMES = {
    "out": ("--out", "-o"),
    "overrides": ("--set",),
    "prompts": ("--prompt",),
    "sizes": ("--bytes",),
    "measure": ("--no-measure",),
    "as_json": ("--json",),
    "quiet": ("--quiet", "-q"),
    "verbose": ("--verbose", "-v"),
}
"""Names of options that are not the parameter's."""

REPEATED = ("overrides", "text", "prompts")
"""Parameters whose options may be repeated."""

METAVARS = {
    "overrides": "KEY=VALUE",
    "program": "COMMAND [ARGS]...",
    "tasks": "A,B",
    "lengths": "A,B",
    "text": "FILE",
    "prompts": "TEXT",
    "base_model": "ID",
    "prompt_file": "FILE",
}


@dataclass
class Json:
    """Form in which results are printed."""

    as_json: bool = False

    def show(self, data: object, text: Callable[[], None]) -> None:
        """Print the data, or what `text` prints."""
        print_json(data) if self.as_json else text()


@dataclass
class OutputOptions(Json):
    """Output options, with --quiet and --verbose."""

    quiet: bool = False
    verbose: bool = False

    def progress(self) -> Progress:
        return show_progress(self.quiet, self.verbose)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """A function that Typer can call.

    Parameters that are dataclasses (requests, and groups of options) become an option for each of their fields. Those
    without a default are arguments, but `out`. Help is in the docstring's Args, in the dataclass's, or in HELP.
    """
    text, _, described = (inspect.getdoc(function) or "").partition("\n\nArgs:\n    ")
    helps = dict(entry.split(": ", 1) for entry in re.split(r"\n    (?=\w+: )", described) if entry)
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = [p for name, p in inspect.signature(function).parameters.items() if name not in groups]
    for group in groups.values():
        parameters += [p for name, p in inspect.signature(group).parameters.items() if name not in INTERNAL]
        hints |= get_type_hints(group, include_extras=True)
        helps = described_fields(group) | helps
    helps = HELP | helps
    parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)
    kinds = {p.name: _explained(p, hints[p.name], " ".join(helps.get(p.name, "").split())) for p in parameters}
    lists = {p.name: read for p in parameters if (read := _list_reader(hints[p.name])) is not None}

    @functools.wraps(function)
    def call(**given: Any) -> None:
        for name in given.keys() & {*NEGATED}:
            given[name] = not given[name]
        for name, read in lists.items():
            given[name] = read(NAMES.get(name, (f"--{name}",))[0], given[name])
        for name, group in groups.items():
            names = [field.name for field in dataclasses.fields(group) if field.name in given]
            given[name] = group(**{field: given.pop(field) for field in names})
        function(**given)

    call.__doc__, call.__annotations__ = text, kinds
    shown = [p.replace(annotation=kinds[p.name], kind=p.KEYWORD_ONLY, default=_default(p)) for p in parameters]
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return call


def _default(parameter: inspect.Parameter) -> object:
    """A parameter's default as its option has it."""
    default = parameter.default
    if parameter.name in NEGATED:
        return not default
    if isinstance(default, tuple) and parameter.name not in REPEATED:
        return ",".join(map(str, default))
    return default


def split(names: str) -> list[str]:
    """`a, b` as a list."""
    return [name.strip() for name in names.split(",") if name.strip()]


def numbers(option: str, text: str) -> list[int]:
    """`1,8`; raises UsageError unless they are positive whole numbers."""
    items = split(text)
    if not items or not all(item.isdecimal() and item.isascii() and 0 < int(item) <= MAX_NUMBER for item in items):
        raise UsageError(f"{option} {text}: expected whole numbers from 1 to {MAX_NUMBER}.", f"Example: {option} 1,8")
    return list(dict.fromkeys(map(int, items)))


def _list_reader(hint: object) -> Callable[[str, str], Sequence[int] | Sequence[str]] | None:
    """Reader of a list that is given as `A,B`, for a field that is a Sequence; None for any other."""
    if get_origin(hint) is not Sequence:
        return None
    if get_args(hint) == (int,):
        return lambda option, text: numbers(option, text) if text else ()
    return lambda option, text: split(text)


def _plain(hint: Any) -> Any:
    """The type that Typer reads for a field of a request: the first of a union, text for a list in commas."""
    kind = without_none(hint)
    if get_origin(kind) in (Union, UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is Sequence:
        return str
    if get_origin(kind) is Iterable:
        return list[str]
    return kind if without_none(hint) is hint else kind | None


def _explained(parameter: inspect.Parameter, hint: Any, text: str) -> Any:
    """A parameter's type with what Typer shall say of it, but for what says it itself."""
    bounds: dict[str, Any] = {}
    conditions = without_none(hint)
    if hasattr(conditions, "__metadata__"):
        info = conditions.__metadata__[0]
        if isinstance(info, (OptionInfo, ArgumentInfo)):
            info = copy.copy(info)
            info.help = info.help or text
            return Annotated[hint.__origin__, info]
        limits = {type(limit).__name__: limit for limit in getattr(info, "metadata", ())}
        if {"Ge", "Le"} <= limits.keys() and conditions.__origin__ is int:
            bounds = {"min": limits["Ge"].ge, "max": limits["Le"].le}
        # The None goes inside of Annotated: older versions of typer do not read `Count | None`.
        hint = conditions.__origin__ if conditions is hint else conditions.__origin__ | None
    kind = _plain(hint)
    names = NAMES.get(parameter.name, ())
    metavar = METAVARS.get(parameter.name)
    if get_origin(without_none(hint)) is Sequence:
        metavar = metavar or "A,B"
    if parameter.default is inspect.Parameter.empty and not names:
        return Annotated[kind, typer.Argument(help=text, metavar=metavar)]
    if parameter.default is False and not names:
        names = (f"--{parameter.name.replace('_', '-')}",)
    return Annotated[kind, typer.Option(*names, help=text, metavar=metavar, **bounds)]
