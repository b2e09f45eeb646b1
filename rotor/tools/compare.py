"""Compressed checkpoints side by side, by what their rotor.json says: nothing is loaded or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checked import JsonObject, Reader, plain
from ..checkpoint.files import ROTOR_JSON
from ..checkpoint.schemas import CheckpointInfo, TextInfo
from ..errors import CheckpointError
from ..models.compressed import CompressedCheckpoint
from ..search.evaluation.accuracy import Accuracy


@dataclass(frozen=True)
class Compared:
    """Facts of one checkpoint. info: its rotor.json. accuracy: as it was measured when it was exported."""

    folder: Path
    info: CheckpointInfo
    accuracy: Accuracy

    @property
    def texts(self) -> list[TextInfo]:
        """Texts that both models wrote to prompts, if `--texts` was given."""
        return self.info.get("texts", [])

    def to_dict(self) -> JsonObject:
        names = ("recipe", "compression", "kv_bytes_per_token", "kv_bytes_of_sequence")
        about = {name: self.info[name] for name in names}  # type: ignore[literal-required]
        source = {name: self.info["source"][name] for name in ("name", "hub_id")}
        return {
            "folder": str(self.folder),
            "source": source,
            **about,
            "accuracy": self.accuracy.to_dict(),
            "texts": plain(self.texts),
        }


def compare(folders: Sequence[str | Path]) -> list[Compared]:
    """Read what checkpoints say of themselves.

    Raises:
        CheckpointError: a folder that `rotor export` did not write, or a damaged one.
    """
    compared = []
    for folder in map(Path, folders):
        info = CompressedCheckpoint(folder).report
        reader = Reader(str(folder / ROTOR_JSON), CheckpointError, "Export again.")
        compared.append(Compared(folder, info, Accuracy.read(info["accuracy"], reader)))
    return compared


def measured_alike(compared: Sequence[Compared]) -> bool:
    """Tell whether all were measured on the same tokens by the same metric, so that their numbers may be compared."""
    return len({(one.accuracy.data_sha256, one.accuracy.metric) for one in compared}) == 1
