"""Requests: what a command is asked to do, as one frozen dataclass for the command line and for Python.

A request's class declares each option once, with its type, default and description. `rotor.cli` makes the options of
the command from it, and `with_fields_of` the keyword arguments of the Python function. None of that needs torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import Field

from .checked import Expect, OneOf, Reader
from .errors import UsageError
from .progress import Progress

P = ParamSpec("P")
Request = TypeVar("Request")
Result = TypeVar("Result")

MAX_NUMBER = 1 << 30

Count = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
"""A number of tokens."""


def with_fields_of(
    request: Callable[P, Request], function: Callable[[Request], Result], name: str
) -> Callable[P, Result]:
    """A function that is called with the fields of a request in its place, and has their descriptions in its help.

    Args:
        request: the dataclass. function: what is done with it. name: of the new function.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        return function(request(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    summary, raises, errors = inspect.cleandoc(function.__doc__ or "").partition("\nRaises:")
    lines = "\n".join(f"    {option}: {text}" for option, text in described_fields(request).items())
    call.__doc__ = f"{summary.rstrip()}\n\nArgs:\n{lines}{raises}{errors}"
    call.__signature__ = inspect.signature(request)  # type: ignore[attr-defined]
    return call


def described_fields(request: Any) -> dict[str, str]:
    """Descriptions of the fields of a request, from the `Args:` of its class and of those that it extends."""
    descriptions: dict[str, str] = {}
    for kind in reversed(request.__mro__):
        text = inspect.cleandoc(kind.__doc__ or "") if is_dataclass(kind) else ""
        name = ""
        for line in text.partition("\nArgs:\n")[2].splitlines():
            if line.startswith("    ") and not line.startswith("     "):
                name, _, first = line.strip().partition(": ")
                descriptions[name] = first
            elif name:
                descriptions[name] += f" {line.strip()}"
    return descriptions


def without_none(hint: Any) -> Any:
    """A type without the None that a missing option has."""
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        return Union[tuple(kind for kind in get_args(hint) if kind is not NoneType)]  # noqa: UP007 - made at run time
    return hint


def check_options(request: Any) -> None:
    """Raise UsageError, naming the option, where a field does not fit the conditions that its type states."""
    hints = get_type_hints(type(request), include_extras=True)
    for option in fields(request):
        name, kind, value = option.name, without_none(hints[option.name]), getattr(request, option.name)
        if value is not None and get_origin(kind) is Annotated:
            shown = f"--{name.replace('_', '-')}"
            Reader(shown, UsageError, _meant(shown, value, kind)).read(kind, value)


def _meant(option: str, value: object, kind: Any) -> str:
    """Hint where a share between 0 and 1 is wanted; `--accuracy 99` is a percentage."""
    limits = {type(limit).__name__: limit for part in kind.__metadata__ for limit in getattr(part, "metadata", ())}
    if kind.__origin__ is not float or "Lt" not in limits or limits["Lt"].lt != 1:
        return ""
    if isinstance(value, (int, float)) and 10 <= value < 100:
        return f"Did you mean {option} {value / 100:g}?"
    return f"Example: {option} 0.99"


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    return name == "auto" or (kind in ("cpu", "cuda") and (index.isdecimal() or not colon))


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where forward passes run.

    Args:
        device: auto (the GPU if there is one), cpu, cuda or cuda:N.
        dtype: auto (the checkpoint's; on a CPU float32, but calibrate takes bfloat16 where model and CPU have it),
            float32, bfloat16 or float16.
    """

    device: Annotated[str, Expect(_is_device, "auto, cpu, cuda or cuda:N")] = "auto"
    dtype: Annotated[str, OneOf(("auto", "float32", "bfloat16", "float16"))] = "auto"

    def __post_init__(self) -> None:
        """Check names; whether the device is there is known when it is used."""
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(DeviceOptions):
    """Where forward passes run, and how weights are held there.

    Args:
        offload: Read weights from disk layer by layer: auto (if they do not fit in memory), always or never.
    """

    offload: Annotated[str, OneOf(("auto", "never", "always"))] = "auto"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A request whose progress somebody sees.

    Args:
        progress: Gets messages, and how far long tasks are.
    """

    progress: Progress | None = field(default=None, compare=False, repr=False)
