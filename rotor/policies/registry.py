"""Look policies up: bundled ones, a user's YAML file, or the policy of a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module, resources
from importlib.util import module_from_spec, spec_from_file_location
from inspect import cleandoc, isabstract
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from ..checked import JsonObject, Reader, nearest_name, shorten
from ..checkpoint.files import read_text, read_yaml
from ..checkpoint.section import EDITED
from ..errors import CheckpointError, RecipeError, UsageError
from . import methods
from .policy import Policy

NONE = "none"


@cache
def method_names() -> list[str]:
    """Names of rotor's methods, one a module in `methods`."""
    return [module.name.replace("_", "-") for module in iter_modules(methods.__path__)]


def find_method(name: str, trusted: bool) -> type[Policy] | None:
    """The class of a method: rotor's by its name, others as `module:Class` or `FILE.py:Class`; None if unknown.

    Args:
        trusted: a module may be imported to find the class. For a name in a checkpoint it may not: the user's program
            must have imported the module.
    """
    module, _, wanted = name.rpartition(":")
    if name in method_names():
        members = vars(import_module(f"{methods.__name__}.{name.replace('-', '_')}")).values()
        return next(c for c in members if isinstance(c, type) and getattr(c, "method", "") == name)
    if not wanted or not (trusted or module in sys.modules):
        return None
    try:
        kind = getattr(import_file(Path(module)) if module.endswith(".py") else import_module(module), wanted, None)
    except (ImportError, OSError):  # also a name that is too long for the system
        return None
    return kind if isinstance(kind, type) and issubclass(kind, Policy) and not isabstract(kind) else None


def import_file(path: Path) -> ModuleType:
    """Import a user's file once, as a module of the file's name, by which a checkpoint names it.

    It may import files beside it.

    Raises:
        RecipeError: another module has that name.
    """
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    spec = spec_from_file_location(path.stem, path.resolve())
    if known is not None or spec is None or spec.loader is None:
        raise RecipeError(f"{path}: a module {path.stem!r} is there already.", "Give the file another name.")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    module = sys.modules[path.stem] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def read_policy(section: object, reader: Reader, trusted: bool = False) -> Policy:
    """Read a policy from plain data of unknown origin.

    Args:
        section: a mapping with `method` and the parameters of that method. trusted: see find_method.
    Raises:
        reader.error: no such method, an unknown parameter, or a value that does not fit.
    """
    if not isinstance(section, Mapping):
        raise reader.fail("cache", section, "a mapping with a method and its parameters")
    method = section.get("method")
    kind = find_method(method, trusted) if isinstance(method, str) else None
    if kind is None:
        if not trusted and isinstance(method, str) and ":" in method:
            hint = "Import its module before; to a command give --cache FILE.py:CLASS."
            raise reader.error(f"{reader.where}: the module of cache policy {method} is not imported.", hint)
        others = "module:Class or FILE.py:Class"
        known = ", ".join([*method_names(), others] if trusted else method_names())
        raise reader.fail("cache.method", method, f"one of {known}{nearest_name(method, method_names()).rstrip('.')}")
    try:
        policy: Policy = reader.read(kind, {key: value for key, value in section.items() if key != "method"}, "cache")
    except UsageError as error:
        raise reader.error(f"{reader.where}: {error.message}", reader.hint) from error
    return policy


def bundled_policies() -> dict[str, Policy]:
    """The bundled policies by name."""
    return {name: _parse(path.read_text("utf-8"), name) for name, path in _bundled().items()}


def find_policy(name: str) -> Policy | None:
    """Find a policy as --cache names it; None for `none`.

    Args:
        name: of a bundled policy, the path of a YAML file, or `FILE.py:Class` (`module:Class`), a class with defaults.
    Raises:
        RecipeError: no such policy, or what the name leads to is not one.
    """
    if name == NONE:
        return None
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _parse(read_text(path, f"cache policy {name}"), name)
    if ":" in name:
        where = f"cache policy {name if len(name) <= 200 else shorten(name)}"
        return read_policy({"method": name}, Reader(where, RecipeError), trusted=True)
    return _parse(_text_of(name), name)


def describe_policy(name: str) -> str:
    """A bundled policy as YAML that --cache takes: what it is, what its fields mean, and each of them.

    Raises:
        RecipeError: no such policy.
    """
    policy, about = _parse(_text_of(name), name), []
    for kind in type(policy).__mro__:
        if issubclass(kind, Policy) and kind.__doc__ and kind is not Policy:
            about += ["", *cleandoc(kind.__doc__).splitlines()]
    comments = [line for line in _text_of(name).splitlines() if line.startswith("#")]
    lines = [*comments, *(f"# {line}".rstrip() for line in about)]
    for field, value in policy.as_dict().items():
        lines.append(f"{field}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _text_of(name: str) -> str:
    files = _bundled()
    if name not in files:
        raise RecipeError(
            f"cache policy {name!r} is neither bundled nor a YAML file{nearest_name(name, [NONE, *files])}",
            f"Bundled policies: {NONE}, {', '.join(files)}; or give the path of a YAML file, or FILE.py:Class.",
        )
    return str(files[name].read_text("utf-8"))


def read_stored(section: object) -> Policy | None:
    """Read the policy that a checkpoint stores; None without one. Raises CheckpointError if it does not fit."""
    reader = Reader("config.json, quantization_config", CheckpointError, EDITED)
    return None if section is None else read_policy(section, reader)


def _bundled() -> JsonObject:
    folder = resources.files("rotor.recipes") / "cache"
    return {path.name[:-5]: path for path in sorted(folder.iterdir(), key=str) if path.name.endswith(".yaml")}


def _parse(text: str, where: str) -> Policy:
    where = f"cache policy {where}"
    return read_policy(read_yaml(text, where), Reader(where, RecipeError), trusted=True)
