"""Files of runs and checkpoints: their names, JSON and YAML of unknown origin, hashes, and how one appears whole."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..checked import JsonObject
from ..errors import CheckpointError, RecipeError

if TYPE_CHECKING:
    from torch import Tensor

INFO = "run.json"
"""Record of a calibration: see rotor.checkpoint.schemas.RunInfo."""

ROTOR_JSON = "rotor.json"
"""Record of what was done, measured and written: see rotor.checkpoint.schemas.CheckpointInfo."""

KERNEL_CONFIG = "kernel_config.json"
RECIPE = "recipe.yaml"
CARD = "README.md"

RESULTS = "results.json"


MAX_JSON_BYTES = 1 << 27
"""Largest JSON file that is read; the index of a model with a million tensors is smaller."""


def json_text(data: object) -> str:
    """A value as JSON in ASCII; NaN and Infinity, which JSON lacks, become null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path, hint: str = "") -> JsonObject:
    """Read a JSON object from a file; raises CheckpointError where it is missing or not one."""
    if not path.is_file():  # a pipe would wait for its writer
        raise CheckpointError(f"{path}: no such file.", hint)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} of any sensible file.", hint)
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: not readable as JSON: {reason}", hint) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}.", hint)
    return data


def differences(
    old: object, new: object, name: str = "", *, optional: Callable[[str], bool] = lambda name: False
) -> Iterator[tuple[str, object, object]]:
    """(dotted name, old value, new value) of everything that is not the same, in the order of the old value.

    Objects are compared key by key, lists of one length entry by entry; tuples count as lists. Values of different
    types differ, so that 1 is not 1.0 and not true.

    Args:
        optional: whether in the object of that name only keys that both have are compared.
    """
    old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        shared_only = optional(name)
        for key in [key for key in old if key in new] if shared_only else dict.fromkeys([*old, *new]):
            below = f"{name}.{key}" if name else str(key)
            yield from differences(old.get(key), new.get(key), below, optional=optional)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (first, second) in enumerate(zip(old, new, strict=True)):
            yield from differences(first, second, f"{name}[{index}]", optional=optional)
    elif type(old) is not type(new) or old != new:
        yield name, old, new


def shorten_json(value: object) -> str:
    """A value on one line of at most 40 characters; a hash keeps its end."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-6:]}"


MAX_CHARACTERS = 1 << 18
"""Longest YAML file that is read."""


def read_text(path: Path, where: str) -> str:
    """Read a text file that a user named; raises RecipeError if it cannot be read or is not text."""
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
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"{where}: {len(text)} characters, more than the {MAX_CHARACTERS} of any sensible file.")
    try:
        return yaml.load(text, _PlainLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError, TypeError, AttributeError) as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


class _PlainLoader(yaml.SafeLoader):
    """Loads YAML without aliases; 1e-3 and 4.8e12 are numbers, as in YAML 1.2 and everywhere else."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.YAMLError(f"an alias (*name) in line {mark.line + 1}; write the value out")
        return super().compose_node(parent, index)


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """Hash of the elements in row-major order, as the safetensors file stores them."""
    import torch  # heavy, and not needed for files

    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to; it is renamed to `path` when the `with` ends well, else removed.

    The content is on the disk before the new name is, and the name before the `with` is left. The writer holds the
    lock of the folder, so the temporary name need not be unique: what a killed process left there is replaced.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # never through a link
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent.resolve())  # what a user calls a folder may be a link to it
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, data: object) -> None:
    write_text(path, f"{json_text(data)}\n")


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; some network file systems cannot do that for a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
