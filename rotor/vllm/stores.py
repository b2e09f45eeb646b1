"""Keep prefixes in stores outside of an engine apart by checkpoint and dtype. Imports nothing of vLLM.

vLLM's connectors look stored rows up by the tokens of a prefix, some also by the model's name: they would take rows of
another checkpoint in the same folder, or of another dtype, for this engine's.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from ..errors import UsageError

OPTION = "rotor_prefixes"
"""Key of the mark in every connector's extra configuration, for connectors of users to go by."""

BY_BLOCK_HASH = "OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "LMCacheMPConnector"
"""Stores that go by vLLM's hashes of blocks, whose seed is the environment's PYTHONHASHSEED."""

BY_FOLDER = "ExampleConnector"
"""The store that goes by tokens, within a folder."""

NO_STORE = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"),
    *("DecodeBenchConnector", "ExampleHiddenStatesConnector"),
)
"""Connectors that hand a request's rows to the engine that continues it, or store none."""

SEED = "PYTHONHASHSEED"


def prefix_mark(digest: str, dtype: str) -> str:
    """Mark of a checkpoint and dtype, 16 hexadecimal digits: rows of the same tokens are equal only under one mark."""
    return hashlib.sha256(f"{digest} {dtype}".encode()).hexdigest()[:16]


def keep_apart(transfer: Any, mark: str) -> None:
    """Change where an engine's connector stores and looks for prefixes, so that it finds only those of this mark.

    Args:
        transfer: vLLM's KVTransferConfig; its extra configuration is changed, and the environment of this process and
            those that it starts.
    Raises:
        UsageError: a connector with unknown hashes of its own.
    """
    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if transfer.kv_connector_module_path is None and name not in (*BY_BLOCK_HASH, BY_FOLDER, *NO_STORE):
        raise UsageError(
            f"--kv-transfer-config, {name}: stores prefixes by hashes of its own, by which those of another checkpoint "
            "in the same folder would be taken for this one's.",
            f"Use one of {', '.join(BY_BLOCK_HASH)}, or a connector of your own that heeds {OPTION}.",
        )
    if name == BY_FOLDER and extra.get(OPTION) != mark:
        extra["shared_storage_path"] = os.path.join(extra.get("shared_storage_path", "/tmp"), mark)
    extra[OPTION] = mark
    os.environ[SEED] = str(int(mark[:8], 16))
