"""Read data of unknown origin (YAML, JSON) as the types that the code expects; an error names the field.

The types are the schema: dataclasses (every key must be known), TypedDicts (further keys are left alone), and what they
are made of. What is read is bounded by the types, never by what the data says of itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
import sys
import types
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import yaml

from .errors import RecipeError, RotorError

MAX_YAML_CHARACTERS = 1 << 18
LARGEST_INTEGER = 2**63 - 1

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = 60
_shortener.maxlevel = 2


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads values into types; raises `error` with `hint` where they do not fit.

    where: names the file in errors.
    """

    where: str
    error: type[RotorError] = RecipeError
    hint: str = ""

    def read(self, hint: Any, value: Any, name: str = "") -> Any:
        """`value` as the type `hint`: a dataclass is built, of other types an equal value is returned.

        Args:
            name: dotted name of the value so far, empty for the whole file.
        """
        origin = get_origin(hint)
        options = get_args(hint) if origin in (Union, types.UnionType) else (hint,)
        for option in options:
            fits, result = self._try(option, value, name)
            if fits:
                return result
        expected = describe(hint)
        choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
        place = f"{name}: " if name else ""
        raise self.error(
            f"{self.where}: {place}got {shorten(value)}, expected {expected}{nearest_name(value, choices)}", self.hint
        )

    def fail(self, name: str, got: object, expected: str) -> RotorError:
        """The error of a value whose type is right but whose content is not."""
        return self.error(f"{self.where}: {name}: got {shorten(got)}, expected {expected}.", self.hint)

    def _try(self, option: Any, value: Any, name: str) -> tuple[bool, Any]:
        """Whether the value is of the option's kind, and the value; a field in it that is not raises."""
        origin, args = get_origin(option), get_args(option)
        if dataclasses.is_dataclass(option) or is_typeddict(option):
            return isinstance(value, Mapping), self._fields(option, value, name)
        if origin is Literal:
            return isinstance(value, str) and value in args, value
        if origin in (tuple, list) and isinstance(value, (list, tuple)):
            fixed = origin is tuple and args[-1] is not ...
            if fixed and len(value) != len(args):
                return False, None
            kinds = args if fixed else (args[0] for _ in value)
            items = [self.read(k, v, f"{name}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True))]
            return True, tuple(items) if origin is tuple and not fixed else items  # a pair in JSON stays a list
        if origin is dict and isinstance(value, Mapping):
            return True, {self.read(str, k, name): self.read(args[1], v, join(name, k)) for k, v in value.items()}
        if option is float:
            return (True, float(value)) if _is_number(value) else (False, None)
        if option is int:
            return type(value) is int and abs(value) <= LARGEST_INTEGER, value
        return option is Any or (option is type(None) and value is None) or type(value) is option, value

    def _fields(self, kind: Any, data: Any, name: str) -> Any:
        """The fields of a dataclass or TypedDict; None if `data` is no mapping."""
        if not isinstance(data, Mapping):
            return None
        hints, required = _hints(kind)
        strict = dataclasses.is_dataclass(kind)
        values: dict[Any, Any] = {}
        for key, value in data.items():
            if key in hints:
                values[key] = self.read(hints[key], value, join(name, key))
            elif strict:
                raise self.error(
                    f"{self.where}: unknown key {shorten(join(name, key))}{nearest_name(key, hints)}",
                    f"Known keys: {', '.join(join(name, known) for known in hints)}.",
                )
            else:
                values[key] = value
        missing = [key for key in required if key not in values]
        if missing:
            raise self.error(f"{self.where}: missing key {join(name, missing[0])!r}.", self.hint)
        return kind(**values) if strict else values


def read_text(path: Path, where: str) -> str:
    """The text of a file that a user named. Raises RecipeError where it cannot be read, or is no text."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{where}: cannot be read ({' '.join(str(error).split())}).", "Give a YAML file in UTF-8."
        ) from error


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML without aliases, which can make a short text describe a huge value.

    Raises:
        RecipeError: too long, not valid, or with an alias.
    """
    if len(text) > MAX_YAML_CHARACTERS:
        raise RecipeError(f"{where}: {len(text)} characters, more than the {MAX_YAML_CHARACTERS} of any sensible file.")
    try:
        return yaml.load(text, _PlainLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError, TypeError, AttributeError) as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


class _PlainLoader(yaml.SafeLoader):
    """Without aliases; 1e-3 and 4.8e12 are numbers, as in YAML 1.2 and everywhere else."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(f"an alias (*name) in line {mark.line + 1}; write the value out")
        return super().compose_node(parent, index)


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def nearest_name(word: object, known: Iterable[str]) -> str:
    """The end of an error's sentence: the known word that `word` resembles, if any, and the full stop."""
    text = word[:60].casefold() if isinstance(word, str) else ""
    names = {name.casefold(): name for name in known}
    match = difflib.get_close_matches(text, list(names), n=1)
    return f"; did you mean {names[match[0]]!r}?" if match else "."


def shorten(value: object) -> str:
    """A value as it stands in an error, however large it is."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return "a number of more than 63 bits"  # the decimal text of a huge integer is refused by Python
    try:
        text = _shortener.repr(list(value) if isinstance(value, tuple) else value)  # as YAML and JSON have it
    except ValueError:
        return f"a {type(value).__name__} with a number of more than 63 bits"
    return text if len(text) <= 60 else text[:57] + "..."


def join(name: str, key: object) -> str:
    """A dotted name."""
    text = key if isinstance(key, str) else shorten(key)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{name}.{text}" if name else text


def _is_number(value: Any) -> bool:
    """A finite number that a float can hold."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Types of the fields, and the names of those that must be there."""
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return hints, tuple(
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        )
    return hints, tuple(name for name in hints if name in kind.__required_keys__)


def describe(hint: Any) -> str:
    """A type in words, as errors and references have it."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return " or ".join(map(_describe, options))


def _describe(option: Any) -> str:
    origin, args = get_origin(option), get_args(option)
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin is tuple and args[-1] is not ...:
        return f"a list of {len(args)}"
    if origin in (tuple, list):
        return f"a list of {_describe(args[0])}"
    if origin is dict or is_typeddict(option) or dataclasses.is_dataclass(option):
        return "a mapping"
    names = {type(None): "null", float: "a finite number"}
    return names[option] if option in names else getattr(option, "__name__", str(option))
