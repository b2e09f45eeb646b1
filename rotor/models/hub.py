"""Find a model: a local folder, or a hub id that huggingface_hub fetches into its cache, pinned to a commit.

The configuration is checked before weights are fetched, so that an unsupported model costs no download.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.files import read_json
from ..checkpoint.section import is_compressed
from ..errors import CheckpointError, MissingError, RotorError, UnsupportedModelError, UsageError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
"""Pattern of a hub repository's id: `name` or `owner/name`."""

SIDECAR_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "LICENSE*"]
IGNORED_PATTERNS = ["*/*", "consolidated*"]
"""Folders of other formats, and the second copy of the weights that some repositories have."""


@dataclass(frozen=True)
class ModelSource:
    """A model folder, with `hub_id` and `revision` (a commit hash) if it came from the hub."""

    folder: Path
    hub_id: str | None = None
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name if self.hub_id is None else self.hub_id.rpartition("/")[2]


def check_name(model: str | Path, revision: str | None = None) -> bool:
    """Tell whether `model` is a local folder; False if it may be a hub id. The hub is not asked.

    Raises:
        MissingError: it is neither.
        UsageError: a revision is given for a folder.
    """
    if Path(model).exists():
        if revision is not None:
            raise UsageError(f"--revision {revision}: {model} is a local folder, which has none.", "Leave it out.")
        return True
    if not HUB_ID.fullmatch(str(model)) or str(model).endswith(".gguf"):
        raise MissingError(f"{model}: no such folder.", "Give the folder of a downloaded model, or a hub id.")
    return False


def find_model(model: str | Path, revision: str | None = None, *, weights: bool = True) -> ModelSource:
    """Find the folder of a model; if `model` is a hub id, it is fetched.

    The cache, tokens and settings of huggingface_hub (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) apply.

    Args:
        revision: branch, tag or commit of a hub repository.
        weights: False fetches only configuration, tokenizer and index.
    Raises:
        MissingError: there is neither such a folder nor such a repository.
        CheckpointError: the repository cannot be fetched.
        UsageError: a revision is given for a folder.
    """
    if check_name(model, revision):
        return ModelSource(Path(model))
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hub_id = str(model)
    patterns = [*SIDECAR_PATTERNS, *(["*.safetensors"] if weights else [])]
    offline = is_offline_mode()  # some versions would ask the hub for the files of a cached commit
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            local_files_only=offline,
            allow_patterns=patterns,
            ignore_patterns=IGNORED_PATTERNS,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _explained(error, hub_id if revision is None else f"{hub_id} at revision {revision}", offline) from error
    return ModelSource(Path(folder), hub_id, Path(folder).name)


def find_source(model: str | Path, revision: str | None = None, *, weights: bool = True) -> ModelSource:
    """Find the folder of a model that rotor can compress; weights are fetched after the configuration was checked.

    Args: as for find_model.
    Raises:
        UnsupportedModelError: its family, or the form of its weights, is not supported.
        RotorError: as find_model.
    """
    source = find_model(model, revision, weights=False)
    if (source.folder / "config.json").is_file():  # otherwise opening the folder raises an error that says what it is
        _check(source.folder)
    return source if source.hub_id is None or not weights else find_model(model, source.revision)


def _check(folder: Path) -> None:
    """Raise UnsupportedModelError if rotor cannot compress the model."""
    from ..checkpoint.families import find_family  # imports torch, which checking a name does not need
    from .source import config_of

    config = read_json(folder / "config.json")
    if is_compressed(config):
        raise UnsupportedModelError(
            f"{folder}: `rotor export` wrote it: it is compressed already.",
            "Give the run or the model that it was made from (rotor.json names both), or use it as it is.",
        )
    find_family(config_of(folder))


def _explained(error: Exception, name: str, offline: bool) -> RotorError:
    """Translate an error of huggingface_hub into one that says why the repository is not available."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    where = f"{name}: no such folder, and"
    check = "Check the name and the connection, or give a model's folder."
    if isinstance(error, GatedRepoError):
        return CheckpointError(f"{where} a gated model on the hub.", "Ask for access on its page, and set HF_TOKEN.")
    if isinstance(error, RepositoryNotFoundError):
        return MissingError(f"{where} not on the hub, or private.", "Check the name; a private model needs HF_TOKEN.")
    if isinstance(error, LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE forbids to fetch it" if offline else "the hub cannot be reached"
        return MissingError(f"{where} not in the hub's cache; {why}.", check)
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return CheckpointError(f"{where} the hub did not deliver it: {reason}", check)
