"""Prefixes in stores outside of an engine, kept apart by checkpoint and dtype. Nothing of vLLM.

vLLM's connectors find what they have stored by the tokens of a prefix, and some by the model's name too: rows of
another checkpoint in the same folder, or of another dtype, would be taken for this engine's.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from ...errors import UsageError

OPTION = "rotor_prefixes"
"""In every connector's extra configuration: the mark, for connectors of the user's own to go by."""

BY_BLOCK_HASH = frozenset(
    {"OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "LMCacheMPConnector"}
)
"""Stores that go by vLLM's own hashes of blocks, of which the environment's PYTHONHASHSEED is the seed."""

PLACES = {"ExampleConnector": ("shared_storage_path", "/tmp")}
"""Stores that go by tokens, within a folder: the option that names it, and its default."""

NO_STORE = frozenset(
    {
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "MooncakeConnector",
        "MoRIIOConnector",
        "DecodeBenchConnector",
        "ExampleHiddenStatesConnector",
    }
)
"""Connectors that hand a request's rows to the engine that goes on with it, or none at all."""

SEED = "PYTHONHASHSEED"
_seeds: dict[str, str] = {}
"""Seed that this process was given, by the one that took its place."""


def prefix_mark(digest: str, dtype: str) -> str:
    """What rows of equal tokens are equal by, of the digest of the checkpoint's manifest: 16 hexadecimal digits."""
    return hashlib.sha256(f"{digest} {dtype}".encode()).hexdigest()[:16]


def keep_apart(transfer: Any, mark: str) -> None:
    """Change where the connectors of an engine store and find prefixes, so that only those of this mark are found.

    Args:
        transfer: vLLM's KVTransferConfig; its extra configuration is changed, and the environment of this process and
            those that it starts.
    Raises:
        UsageError: a connector with hashes of its own, of which nothing is known here.
    """
    _mark(transfer.kv_connector, transfer.kv_connector_extra_config, mark, transfer.kv_connector_module_path)
    now = os.environ.get(SEED, "")
    given = _seeds.get(now, now)
    os.environ[SEED] = hash_seed(mark, given)
    _seeds[os.environ[SEED]] = given


def hash_seed(mark: str, given: str) -> str:
    """A seed of 64 bits of a mark and of the seed that the user gave, if any.

    vLLM hashes the text; Python, which starts with the same variable, takes a number of 32 bits behind any blanks.
    """
    digest = hashlib.sha256(f"{mark} {given}".encode()).digest()
    blanks = "".join(" \t"[byte >> bit & 1] for byte in digest[4:8] for bit in range(8))
    return f"{blanks}{int.from_bytes(digest[:4], 'big')}"


def _mark(name: str, extra: dict[str, Any], mark: str, module: str | None) -> None:
    if extra.get(OPTION) == mark:
        return
    extra[OPTION] = mark
    if name == "MultiConnector":
        for inner in extra.get("connectors", []):
            options = inner.setdefault("kv_connector_extra_config", {})
            _mark(inner["kv_connector"], options, mark, inner.get("kv_connector_module_path"))
    elif name in PLACES:
        option, default = PLACES[name]
        extra[option] = os.path.join(extra.get(option, default), mark)
    elif module is None and name not in BY_BLOCK_HASH | NO_STORE:
        raise UsageError(
            f"--kv-transfer-config, {name}: stores prefixes by hashes of its own, by which those of another checkpoint "
            "in the same folder, would be taken for this one's.",
            f"Use one of {', '.join(sorted(BY_BLOCK_HASH))}, or a connector of your own that heeds {OPTION}.",
        )
