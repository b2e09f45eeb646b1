"""The resumable store of a study: one JSON file of records by key, rewritten whole after each new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...checkpoint.files import RESULTS, differences, json_text, read_json, shorten_json, write_json
from ...errors import UsageError

STORE_VERSION = 2

Record = dict[str, Any]
"""Measurements of one thing, or the request of a study, in JSON's types."""


class StudyStore:
    """Records of a study by key (`part/name/...`), with the settings that they all share."""

    def __init__(self, folder: Path, settings: Record, records: dict[str, Record] | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self.records = records or {}
        self.added = 0

    @property
    def path(self) -> Path:
        return self.folder / RESULTS

    @classmethod
    def read(cls, folder: Path, settings: Record) -> StudyStore:
        """The store in `folder`, or a new one; nothing is written.

        Args:
            settings: what decides the numbers. Names under `recipes` may be added by a later start; everything
                else has to stay as it was.
        Raises:
            UsageError: the folder holds a study with other settings (names them with both values), or something else.
        """
        store = cls(folder, json.loads(json.dumps(settings)))
        if not store.path.is_file():
            if folder.is_dir() and any(folder.iterdir()):
                raise UsageError(f"{folder}: is not empty and holds no study.", "Give another folder with -o.")
            return store
        data = read_json(store.path, "Delete it to start the study again.")
        if data.get("version") != STORE_VERSION or not isinstance(data.get("records"), dict):
            raise UsageError(f"{store.path}: not a study of this version of rotor.", "Give another folder with -o.")
        stored = data.get("settings", {})
        changed = list(differences(stored, store.settings, optional=lambda name: name == "recipes"))
        if changed:
            shown = "; ".join(f"{name} was {shorten_json(a)}, now {shorten_json(b)}" for name, a, b in changed[:4])
            raise UsageError(
                f"{store.path}: was measured with other settings: {shown}{' ...' if len(changed) > 4 else ''}.",
                "Give the same settings (--set) to continue it, or another folder with -o.",
            )
        store.settings["recipes"] = {**stored.get("recipes", {}), **store.settings["recipes"]}
        store.records = data["records"]
        return store

    def put(self, key: str, record: Record) -> Record:
        """Add one record, and write the file unless it is there with the same values."""
        record = json.loads(json_text(record))
        if self.records.get(key) != record:
            self.records[key] = record
            self.added += 1
            self.save()
        return record

    def part(self, name: str) -> dict[str, Record]:
        """The records whose key starts with `name/`, by the rest of their key, in order of arrival."""
        return {key[len(name) + 1 :]: record for key, record in self.records.items() if key.startswith(f"{name}/")}

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"version": STORE_VERSION, "settings": self.settings, "records": self.records})
