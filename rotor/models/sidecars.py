"""Files beside the weights that belong to a model: tokenizer, templates, generation settings, licence.

Only files on this list are copied into a checkpoint, so that no key, backup or second copy of the weights that happens
to lie in the folder is published with it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CheckpointError

SIDECAR_NAMES = re.compile(
    r"tokenizer(_config)?\.json|tokenizer\.model(\.v\d+)?|tekken\.json|[\w.-]*\.tiktoken"
    r"|vocab\.(json|txt|bpe)|merges\.txt|bpe\.codes|encoder\.json"
    r"|(spiece|sentencepiece(\.bpe)?)\.model"
    r"|special_tokens_map\.json|added_tokens\.json"
    r"|generation_config\.json|chat_template\.(json|jinja)"
    r"|((image_|video_|audio_)?(pre)?processor_config|processor_config)\.json"
    r"|(LICEN[SC]E|NOTICE|COPYING|COPYRIGHT|USE_POLICY|AUTHORS)([_-][\w-]+)?(\.(txt|md|rst|pdf))?",
    re.IGNORECASE,
)


def sidecars(folder: Path) -> list[str]:
    """Names of a model's files to copy unchanged, relative to its folder, sorted.

    Links within the folder and into the folder of config.json (the hub's cache) are followed.

    Raises:
        CheckpointError: a link is broken or leads out of the model.
    """
    files = (path.name for path in folder.iterdir() if path.is_file() or path.is_symlink())
    names = sorted(name for name in files if SIDECAR_NAMES.fullmatch(name))
    here = folder.resolve()
    allowed = {here, (folder / "config.json").resolve().parent}
    for path in (folder / name for name in names):
        target = Path(os.path.realpath(path))
        if not target.is_file() or not allowed & set(target.parents):
            problem = "outside of the model" if target.is_file() else "where there is no file"
            raise CheckpointError(f"{path}: is a link to {target}, {problem}.", "Put a copy of the file in its place.")
    return names
