"""Prefixes in stores outside of an engine, kept apart by checkpoint and dtype. Nothing of vLLM.

vLLM's connectors find what they have stored by the tokens of a prefix, and some by the model's name too: rows of
another checkpoint in the same folder, or of another dtype, would be taken for this engine's.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from ..errors import UsageError

OPTION = "rotor_prefixes"
"""In every connector's extra configuration: the mark, for connectors of the user's own to go by."""

BY_BLOCK_HASH = "OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "LMCacheMPConnector"
"""Stores that go by vLLM's own hashes of blocks, of which the environment's PYTHONHASHSEED is the seed."""

BY_FOLDER = "ExampleConnector"
"""Goes by tokens, within a folder."""

NO_STORE = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"),
    *("DecodeBenchConnector", "ExampleHiddenStatesConnector"),
)
"""Connectors that hand a request's rows to the engine that goes on with it, or none at all."""

SEED = "PYTHONHASHSEED"


def prefix_mark(digest: str, dtype: str) -> str:
    """What rows of equal tokens are equal by, of the digest of the checkpoint's manifest: 16 hexadecimal digits."""
    return hashlib.sha256(f"{digest} {dtype}".encode()).hexdigest()[:16]


def keep_apart(transfer: Any, mark: str) -> None:
    """Change where the connector of an engine stores and finds prefixes, so that only those of this mark are found.

    Args:
        transfer: vLLM's KVTransferConfig; its extra configuration is changed, and the environment of this process and
            those that it starts.
    Raises:
        UsageError: a connector with hashes of its own, of which nothing is known here.
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
