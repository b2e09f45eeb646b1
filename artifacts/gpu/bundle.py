"""Carry a model to a GPU machine without network: a file in parts that are small enough to send, joined and checked
there.

    python artifacts/gpu cut weights.gguf -o .gpu-model
    python artifacts/gpu join .gpu-model
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from rotor.errors import CheckpointError, UsageError

PART_BYTES = 60 << 20
"""Most bytes of a part."""

LIST = "parts.json"
KINDS = (".gguf", ".tar")
CHUNK_BYTES = 1 << 20


def cut(file: Path, folder: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Cut a file into parts in a new folder, with a list of their hashes.

    Raises:
        UsageError: no such file, a kind that `unpack` does not read, or a folder that is there.
    """
    if not file.is_file() or file.suffix not in KINDS:
        raise UsageError(
            f"{file}: expected a file of packed weights, {' or '.join(KINDS)} (of a model's folder).",
            "A folder becomes one by: tar -cf MODEL.tar -C MODEL .",
        )
    if folder.exists():
        raise UsageError(f"{folder} is there already.", "Remove it, or give another folder by -o.")
    folder.mkdir(parents=True)
    parts, whole, size = [], hashlib.sha256(), file.stat().st_size
    digits = len(str(max(0, size - 1) // part_bytes))
    with file.open("rb") as source:
        for number, start in enumerate(range(0, size, part_bytes)):
            path, digest, left = folder / f"part-{number:0{digits}}", hashlib.sha256(), min(part_bytes, size - start)
            parts.append({"name": path.name, "bytes": left})
            with path.open("wb") as to:
                while left:
                    content = source.read(min(CHUNK_BYTES, left))
                    to.write(content)
                    digest.update(content)
                    whole.update(content)
                    left -= len(content)
            parts[-1]["sha256"] = digest.hexdigest()
    listed = {"name": file.name, "bytes": size, "sha256": whole.hexdigest(), "parts": parts}
    (folder / LIST).write_text(json.dumps(listed, indent=1) + "\n", "utf-8")
    return [folder / LIST, *(folder / str(part["name"]) for part in parts)]


def join(folder: Path) -> Path:
    """Join the parts in a folder, each of which is checked; a file that is whole already is left as it is.

    Raises:
        UsageError: there is no list of parts, or a part is missing. CheckpointError: one is not what was cut.
    """
    if not (folder / LIST).is_file():
        raise UsageError(f"{folder}: no {LIST}.", "Carry what `make gpu-bundle MODEL=FILE` wrote.")
    listed = json.loads((folder / LIST).read_text("utf-8"))
    out = folder / listed["name"]
    if out.is_file() and _sha256(out) == listed["sha256"]:
        return out
    missing = [part["name"] for part in listed["parts"] if not (folder / part["name"]).is_file()]
    if missing:
        raise UsageError(
            f"{folder}: {len(missing)} of {len(listed['parts'])} parts are missing: {', '.join(missing)}.",
            "Carry them too; those that are here stay.",
        )
    joining, whole = folder / f"{listed['name']}.partial", hashlib.sha256()
    with joining.open("wb") as to:
        for part in listed["parts"]:
            digest = hashlib.sha256()
            for content in _chunks(folder / part["name"]):
                to.write(content)
                digest.update(content)
                whole.update(content)
            _check(folder / part["name"], digest.hexdigest(), part["sha256"])
    _check(joining, whole.hexdigest(), listed["sha256"])
    os.replace(joining, out)
    return out


def unpack(file: Path, out: Path) -> Path:
    """Write a joined file as the folder of a model."""
    shutil.rmtree(out, ignore_errors=True)
    if file.suffix == ".tar":
        with tarfile.open(file) as archive:
            archive.extractall(out, filter="data")
    else:
        import_module("real_models").convert(file, out)  # needs the package gguf
    return out


def _check(path: Path, got: str, expected: str) -> None:
    if got != expected:
        raise CheckpointError(f"{path}: SHA-256 {got}, expected {expected}.", "Carry this part again.")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for content in _chunks(path):
        digest.update(content)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while content := file.read(CHUNK_BYTES):
            yield content
