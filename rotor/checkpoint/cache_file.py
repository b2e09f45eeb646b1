"""The file of a saved cache: packed tensors in safetensors, and what they are.

    metadata: rotor_cache (a JSON text, `CacheInfo`), sha256 (of that text)
    tensors:  bytes by name, the SHA-256 of each in `CacheInfo.sha256`

The hashes show damage, not intent: who forges tensors forges their hashes too. So whatever is read from a file is
checked against the model that it is read for, by `rotor.runtime.saved_cache`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from ..checked import Expect, Reader
from ..errors import CheckpointError, MissingError, UsageError
from .files import replacing, tensor_sha256
from .locks import exclusive
from .publishing import check_space
from .row_channels import DAMAGED
from .rows import Level

CACHE_VERSION = 2
"""Version of the file; others are refused."""

KEY, HASH = "rotor_cache", "sha256"
"""Names in the file's metadata."""

MOST_TEXT = 1 << 26
"""Characters of `CacheInfo` that are read at most."""


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


Digest = Annotated[str, Expect(_is_digest, "64 hexadecimal digits")]
Tokens = Annotated[int, Field(ge=0, le=1 << 30)]
Count = Annotated[int, Field(ge=1, le=1 << 30)]


class CacheInfo(TypedDict):
    """Description of a saved cache.

    version: of the file. checkpoint: digest of the checkpoint that filled it. dtype: of the model. level: by which it
    is packed. tokens, sequences: of the cache, padding among the tokens. chunk: tokens whose rows are packed together.
    held: of each layer, the newest tokens that it holds rows of. until: of each layer, see `ExactRows`.
    begin: index of each sequence's first token behind padding; empty where no layer keeps exact tokens.
    """

    version: int
    checkpoint: Digest
    dtype: str
    level: Level
    tokens: Count
    sequences: Count
    chunk: Count
    held: list[Tokens]
    until: list[Tokens]
    sha256: dict[str, Digest]


def write_cache_file(path: Path, info: CacheInfo, tensors: Mapping[str, Tensor]) -> None:
    """Write a file that appears whole or not at all, in place of an older cache of that name.

    Raises:
        UsageError: another process writes it, or something else has the name. CheckpointError: the disk is too small,
            or fails; then an older cache is still there.
    """
    info = {**info, "sha256": {name: tensor_sha256(tensor) for name, tensor in tensors.items()}}
    text = json.dumps(info, allow_nan=False)
    metadata = {KEY: text, HASH: hashlib.sha256(text.encode()).hexdigest()}
    with exclusive(path):
        check_place(path)
        check_space(path.parent, sum(tensor.nbytes for tensor in tensors.values()) + len(text))
        try:
            with replacing(path) as temporary:
                mode = temporary.stat().st_mode
                save_file(dict(tensors), temporary, metadata=metadata)
                temporary.chmod(mode)  # safetensors allows its owner alone
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{path}: writing failed: {reason}", "Nothing was changed there.") from error


def check_place(path: Path) -> None:
    """Check that nothing but a saved cache would be replaced; raises UsageError if so."""
    if not path.exists() and not path.is_symlink():
        return
    try:
        ours = path.is_file() and KEY in _metadata(path)
    except SafetensorError:
        ours = False
    if not ours:
        raise UsageError(f"{path}: is no saved cache, and is not replaced.", "Choose another name, or remove it.")


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


class CacheFile:
    """A saved cache, open for reading.

    info: what the file says of itself, checked for its form.

    Raises:
        MissingError: there is no such file. CheckpointError: it is none that rotor wrote, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise MissingError(f"{path}: no such file.", "Save one: rotor.save_cache, or rotor generate --save-cache.")
        try:
            self._file: Any = safe_open(path, "pt")
            metadata = self._file.metadata() or {}
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path}: is no saved cache, or was cut: {reason}.", DAMAGED) from error
        text = metadata.get(KEY)
        if text is None or len(text) > MOST_TEXT:
            raise CheckpointError(f"{path}: is no saved cache.", "Give a file that rotor.save_cache wrote.")
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get(HASH):
            raise CheckpointError(f"{path}: what it says of itself differs from its SHA-256.", DAMAGED)
        self.info = self._read(text)

    def _read(self, text: str) -> CacheInfo:
        reader = Reader(str(self.path), CheckpointError, DAMAGED)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: not readable as JSON: {error}"[:300], DAMAGED) from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != CACHE_VERSION:
            raise CheckpointError(
                f"{self.path}: version {version!r}"[:200] + f" of saved caches, this rotor reads {CACHE_VERSION}.",
                "Save the cache again.",
            )
        info: CacheInfo = reader.read(CacheInfo, data)
        return info

    def has(self, name: str) -> bool:
        return name in self.info["sha256"]

    def tensor(self, name: str) -> Tensor:
        """Read a tensor; raises CheckpointError if it is missing or differs from its hash."""
        if not self.has(name):
            raise CheckpointError(f"{self.path}: {name} is missing.", DAMAGED)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{self.path}: {name} cannot be read: {reason}.", DAMAGED) from error
        if tensor_sha256(tensor) != self.info["sha256"][name]:
            raise CheckpointError(f"{self.path}: {name} differs from its SHA-256.", DAMAGED)
        return tensor
