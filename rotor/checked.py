"""Check data of unknown origin (YAML, JSON) against the types that the code expects; an error names the field.

pydantic does the checking. This module puts its errors into rotor's words. It describes what a field may be from the
JSON schema of its type, in errors and in the reference of recipes alike.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import core_schema, from_json, to_json
from typing_extensions import is_typeddict

from .errors import RecipeError, RotorError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

JsonObject = dict[str, Any]
"""A JSON object as it is read or written; what must be of some type is read with a `Reader`."""

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = 60
_shortener.maxlevel = 2


@dataclass(frozen=True)
class Expect:
    """A condition that a field's type does not express: `Annotated[int, Expect(is_even, "an even number")]`.

    names: known values, of which an error suggests the nearest.
    """

    test: Callable[[Any], bool]
    words: str
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        return handler(schema) | {"expected": self.words, "names": list(self.names)}

    def _check(self, value: object) -> object:
        if not self.test(value):
            raise ValueError(self.words)
        return value


@dataclass(frozen=True)
class OneOf:
    """A text that is one of these names, which are registered somewhere: `Annotated[str, OneOf(METHODS)]`."""

    names: Iterable[str]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.names))


class InvalidField(ValueError):
    """A field, given by its dotted name, does not fit the others; raised by a model's validators."""

    def __init__(self, name: str, got: object, expected: str) -> None:
        super().__init__(f"{name}: got {shorten(got)}, expected {expected}")


@dataclass(frozen=True)
class Reader:
    """Reads values as types; raises `error` with `hint` where they do not fit.

    where: names the file in errors.
    """

    where: str
    error: type[RotorError] = RecipeError
    hint: str = ""

    def read(self, kind: Any, value: Any, name: str = "") -> Any:
        """Check `value` against the type `kind`; lists become tuples where tuples are expected.

        Unknown keys are refused, except in a TypedDict, which keeps them.

        Args:
            name: dotted name of the value, empty for the whole file.
        """
        extra: Literal["allow", "forbid"] = "allow" if is_typeddict(kind) else "forbid"
        try:
            data = to_json(value, inf_nan_mode="strings")
            return _adapter(kind).validate_json(data, strict=True, extra=extra)
        except ValidationError as error:
            raise self._refusal(kind, data, error, name) from None
        except (ValueError, RecursionError) as error:  # lone surrogates, numbers of thousands of digits
            raise self.error(f"{self.where}: {name or 'a value'} is not plain data: {error}"[:300], self.hint) from None

    def fail(self, name: str, got: object, expected: str) -> RotorError:
        """Error for a value whose type is right but whose content is not."""
        return self.error(f"{self.where}: {name}: got {shorten(got)}, expected {expected}.", self.hint)

    def _refusal(self, kind: Any, data: bytes, error: ValidationError, name: str) -> RotorError:
        """Put pydantic's first complaint into rotor's words."""
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            return self.error(f"{self.where}: {name or 'a value'} is not plain data: {first['msg']}.", self.hint)
        reason = first.get("ctx", {}).get("error")
        if isinstance(reason, InvalidField):
            return self.error(f"{self.where}: {reason}.", self.hint)
        value, path = from_json(data), []
        for key in first["loc"]:  # the end of `loc` may name a missing key or an option of a union
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                break
            path.append(key)
        place = joined(name, *path)
        if first["loc"][-1:] == ("[key]",):
            above = joined(name, *path[:-1])
            return self.error(f"{self.where}: {above}: got the key {shorten(path[-1])}, expected {reason}.", self.hint)
        if first["type"] == "missing" and isinstance(value, dict):
            return self.error(f"{self.where}: missing key {joined(place, first['loc'][-1])!r}.", self.hint)
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = [key for option in options(kind, path[:-1]) for key in option.get("properties", ())]
            return self.error(
                f"{self.where}: unknown key {place!r}{nearest_name(path[-1], known)}",
                f"Known keys: {', '.join(joined(name, *path[:-1], key) for key in known)}.",
            )
        expected = options(kind, path)
        names = [name for option in expected for key in ("names", "enum") for name in option.get(key, ())]
        return self.error(
            f"{self.where}: {place and f'{place}: '}got {shorten(value)}, expected "
            f"{' or '.join(map(in_words, expected)) or first['msg']}{nearest_name(value, names)}",
            self.hint,
        )


def plain(value: object) -> Any:
    """Convert a dataclass to JSON's types, which `Reader.read` reads back."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json", by_alias=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _schema(kind: Any) -> JsonObject:
    return _adapter(kind).json_schema()


def options(kind: Any, path: Iterable[str | int] = ()) -> list[JsonObject]:
    """JSON schemas of the values allowed at a path inside a type: several for a union, otherwise one."""
    schema = _schema(kind)
    definitions = schema.get("$defs", {})

    def resolved(schema: JsonObject) -> list[JsonObject]:
        if "$ref" in schema:
            return resolved(definitions[schema["$ref"].rpartition("/")[2]])
        union = () if "expected" in schema else schema.get("anyOf", ())
        return [part for option in union for part in resolved(option)] or [schema]

    allowed = resolved(schema)
    for key in path:
        allowed = [option for above in allowed for below in _below(above, key) for option in resolved(below)]
    return allowed


def _below(schema: JsonObject, key: str | int) -> Sequence[JsonObject]:
    """Schemas of the values under a key of an object, or at an index of an array."""
    if isinstance(key, int):
        return schema.get("prefixItems", ())[key : key + 1] or [schema.get("items", {})]
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties")
    return [properties[key]] if key in properties else [others] if isinstance(others, dict) else []


def in_words(schema: JsonObject) -> str:
    """Describe what a JSON schema asks for, in the words of errors and of the recipe reference."""
    if "expected" in schema:
        return str(schema["expected"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind = str(schema.get("type"))
    if kind == "array":
        return f"a list of {len(schema['prefixItems'])}" if "prefixItems" in schema else "a list"
    words = {"integer": "a whole number", "number": "a finite number", "string": "text", "boolean": "true or false"}
    return words.get(kind, "null" if kind == "null" else "a mapping") + _range(schema)


def _range(schema: JsonObject) -> str:
    """The bounds of a number as the end of a sentence."""
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{word} {schema[bound]}" for bound, word in words.items() if bound in schema]
    return f" {' and '.join(bounds)}" if bounds else ""


SHORT_NAMES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Other words for names, which do not resemble them."""


def nearest_name(word: object, known: Iterable[str]) -> str:
    """End of an error's sentence: suggest the known word that `word` resembles, if any, and add the full stop."""
    text = word[:60].casefold() if isinstance(word, str) else ""
    names = {str(name).casefold(): name for name in known}
    match = difflib.get_close_matches(SHORT_NAMES.get(text, text), list(names), n=1)
    return f"; did you mean {names[match[0]]!r}?" if match else "."


def shorten(value: object) -> str:
    """A value shortened for an error message, however large it is."""
    try:
        text = _shortener.repr(list(value) if isinstance(value, tuple) else value)  # as YAML and JSON have it
    except ValueError:  # the decimal text of a huge integer is refused by Python
        return f"a {type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def joined(*keys: str | int) -> str:
    """Join keys into a dotted name, with indices in brackets."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key[:60]}" for key in keys if key != "")
    return "".join(parts).removeprefix(".")
