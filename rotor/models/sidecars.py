"""Files beside the weights that belong to a model: tokenizer, templates, generation settings, licence.

Only what is on this list is taken along into a checkpoint, so that no key, no backup and no other copy of the weights
that happens to lie in the folder is published with it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CheckpointError

BELONGS = re.compile(
    r"tokenizer(_config)?\.json|tokenizer\.model(\.v\d+)?|tekken\.json|[\w.-]*\.tiktoken"
    r"|vocab\.(json|txt|bpe)|merges\.txt|bpe\.codes|encoder\.json"
    r"|(spiece|sentencepiece(\.bpe)?)\.model"
    r"|special_tokens_map\.json|added_tokens\.json"
    r"|generation_config\.json|chat_template\.(json|jinja)|additional_chat_templates/[\w.-]+\.jinja"
    r"|((image_|video_|audio_)?(pre)?processor_config|processor_config)\.json"
    r"|(LICEN[SC]E|NOTICE|COPYING|COPYRIGHT|USE_POLICY|AUTHORS)([_-][\w-]+)?(\.(txt|md|rst|pdf))?",
    re.IGNORECASE,
)
ANNEX = (".git", "annex", "objects")
"""Where git-annex keeps what its links lead to."""


def sidecars(folder: Path) -> list[str]:
    """Names of a model's files to take along unchanged, relative to its folder, sorted.

    Raises:
        CheckpointError: one of them is a link that leads to nothing, or out of the model.
    """
    templates = folder / "additional_chat_templates"
    found = [*folder.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
    names = [path.relative_to(folder).as_posix() for path in found if path.is_file() or path.is_symlink()]
    names = sorted(name for name in names if BELONGS.fullmatch(name))
    for name in names:
        _check_link(folder, folder / name)
    return names


def _check_link(folder: Path, path: Path) -> None:
    """Links within the folder, to where config.json lies (the hub's cache) and into git-annex are followed."""
    target = Path(os.path.realpath(path))
    if not target.is_file():
        raise CheckpointError(
            f"{path}: is a link to {target}, where there is no file.", "Fetch it (git annex get), or remove the link."
        )
    allowed = {folder.resolve(), (folder / "config.json").resolve().parent}
    for place in target.parents:
        if place.parts[-3:] == ANNEX and place.parents[2] in (folder.resolve(), *folder.resolve().parents):
            allowed.add(place)
    if not allowed & set(target.parents):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside of the model.", "Put a copy of the file in its place."
        )
