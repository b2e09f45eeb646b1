"""manifest.json of a finished folder: the SHA-256 of every file in it. The manifest's SHA-256 is the folder's digest.

    {"rotor_manifest": 1, "kind": "checkpoint", "files": {"config.json": "9f86d0...", ...}}

The digest is what `sha256sum manifest.json` prints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from ..errors import CheckpointError
from .files import file_sha256, read_json, write_json

Kind = Literal["checkpoint", "run"]
MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"
MARKERS = (MANIFEST, UNFINISHED)
VERSION = 1
CHANGING = {
    "checkpoint": re.compile(r"(?!)"),
    "run": re.compile(r"log\.txt|report\.html|(tables|probes|work)/.*|(.*/)?\.[^/]+\.tmp"),
}
"""Files that rotor itself writes into a finished folder: log, report and measurements of a run, and what a killed
process leaves."""


@dataclass(frozen=True)
class Manifest:
    """A manifest as read. digest: SHA-256 of its bytes."""

    folder: Path
    kind: Kind
    files: Mapping[str, str]
    digest: str

    @classmethod
    def read(cls, folder: Path, hint: str = "") -> Manifest:
        """Read the manifest of a folder; raises CheckpointError if it is missing or damaged."""
        path = folder / MANIFEST
        data = read_json(path, hint)
        files = data.get("files")
        sound = isinstance(files, dict) and all(isinstance(value, str) for value in files.values())
        if data.get("rotor_manifest") != VERSION or data.get("kind") not in get_args(Kind) or not sound:
            raise CheckpointError(f"{path}: not a manifest of this version of rotor.", hint)
        return cls(folder, data["kind"], data["files"], file_sha256(path))

    def added(self) -> list[str]:
        """Files (links, pipes, empty folders) that are neither listed nor written by rotor later.

        The empty folder of a listed file does not count: an interrupted removal leaves it.
        """
        known = CHANGING[self.kind]
        folders = {f"{parent}/" for name in self.files for parent in PurePosixPath(name).parents}
        return [
            name
            for name in entries_below(self.folder)
            if name not in self.files and name != MANIFEST and name not in folders and not known.fullmatch(name)
        ]

    def problems(self) -> dict[str, str]:
        """Files with a problem, and the problem: `is missing`, `is unexpected`, `differs from its SHA-256`."""
        listed = {name: problem for name in sorted(self.files) if (problem := self.problem(name))}
        return listed | {name: "is unexpected" for name in self.added()}

    def problem(self, name: str) -> str:
        """Describe what is wrong with one file; an empty text if nothing is."""
        path = self.folder / name
        if name not in self.files:
            return "is unexpected"
        if os.path.realpath(path) != f"{os.path.realpath(self.folder)}/{name}" or not path.is_file():
            return "is missing"  # nothing is read that lies elsewhere: a name with .. in it, or one behind a link
        return "" if file_sha256(path) == self.files[name] else "differs from its SHA-256"


def write_manifest(folder: Path, kind: Kind) -> str:
    """List all files of a folder that is about to be published; returns the digest."""
    names = [name for name in entries_below(folder) if name not in MARKERS and not CHANGING[kind].fullmatch(name)]
    files = {name: file_sha256(folder / name) for name in names}
    write_json(folder / MANIFEST, {"rotor_manifest": VERSION, "kind": kind, "files": files})
    return file_sha256(folder / MANIFEST)


def entries_below(folder: Path) -> list[str]:
    """Names of all files in a folder and below it, sorted, and of folders that are empty or links."""
    names = []
    for place, folders, files in os.walk(folder):
        relative = Path(place).relative_to(folder)
        names += [(relative / name).as_posix() for name in files]
        names += [(relative / name).as_posix() for name in folders if (Path(place) / name).is_symlink()]
        if not folders and not files and relative.parts:
            names.append(f"{relative.as_posix()}/")
    return sorted(names)
