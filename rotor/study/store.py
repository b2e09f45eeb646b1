"""The resumable store of a study: one JSON file of records by key, rewritten whole after each new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.atomic import write_json
from ..format.file_names import RESULTS
from ..format.json_differences import differences, shorten_json
from ..format.json_files import json_text, read_json

STORE_VERSION = 1
ADDED_LATER = ("recipes", "ablations")


class StudyStore:
    """Records of a study by key (`part/name/...`), with the settings that they all share.

    A record is measured once: `get` it first, `put` what was missing. Every `put` writes the file anew, so that an
    interrupted study keeps everything before.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
        self.folder, self.settings, self.records = folder, settings, records
        self.added = 0

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> StudyStore:
        """The store in `folder`, or a new one, written there at once; arguments and errors are those of `read`."""
        store = cls.read(folder, settings)
        if not (folder / RESULTS).is_file():
            store.save()
        return store

    @classmethod
    def read(cls, folder: Path, settings: dict[str, Any]) -> StudyStore:
        """The store in `folder`, or a new one; nothing is written.

        Args:
            settings: what decides the numbers. Names under `recipes` and `ablations` may be added by a later start;
                everything else has to stay as it was.
        Raises:
            UsageError: the folder holds a study with other settings (names them with both values), or something else.
        """
        settings = json.loads(json.dumps(settings))
        path = folder / RESULTS
        if not path.is_file():
            if folder.is_dir() and any(folder.iterdir()):
                raise UsageError(f"{folder}: is not empty and holds no study.", "Give another folder with -o.")
            return cls(folder, settings, {})
        data = read_json(path, "Delete it to start the study again.")
        if data.get("version") != STORE_VERSION or not isinstance(data.get("records"), dict):
            raise UsageError(f"{path}: not a study of this version of rotor.", "Give another folder with -o.")
        stored = data.get("settings", {})
        differing = list(differences(stored, settings, optional=lambda name: name in ADDED_LATER))
        if differing:
            shown = "; ".join(
                f"{name} was {shorten_json(old)}, now {shorten_json(new)}" for name, old, new in differing[:4]
            )
            more = f"; and {len(differing) - 4} more" if len(differing) > 4 else ""
            raise UsageError(
                f"{path}: was measured with other settings: {shown}{more}.",
                "Give the same settings (--set) to continue it, or another folder with -o.",
            )
        for section in ADDED_LATER:
            settings[section] = {**stored.get(section, {}), **settings.get(section, {})}
        return cls(folder, settings, data["records"])

    def get(self, key: str) -> dict[str, Any] | None:
        return self.records.get(key)

    def put(self, key: str, record: dict[str, Any]) -> dict[str, Any]:
        """Add one record and write the file."""
        self.records[key] = json.loads(json_text(record))
        self.added += 1
        self.save()
        return self.records[key]

    def part(self, name: str) -> dict[str, dict[str, Any]]:
        """The records whose key starts with `name/`, by the rest of their key, in order of arrival."""
        return {key[len(name) + 1 :]: record for key, record in self.records.items() if key.startswith(f"{name}/")}

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        data = {"version": STORE_VERSION, "settings": self.settings, "records": self.records}
        write_json(self.folder / RESULTS, data)
