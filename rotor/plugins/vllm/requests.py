"""What vLLM is asked for, looked at before anything is built: refused where a compressed checkpoint cannot do it.

Nothing of vLLM's but its KVTransferConfig, which is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, UsageError
from ...format.hashes import file_sha256
from ...format.manifest import MANIFEST, Manifest
from ...format.section import CompressedSection
from ...runtime.families import attention_shape
from .shards import check_size
from .stores import keep_apart, prefix_mark


@dataclass(frozen=True)
class Request:
    """What of vLLM's configuration matters here.

    hf_config: config.json. model: a folder, or a name on the hub, of which `revision` is asked for.
    """

    hf_config: Any
    model: str
    revision: str | None
    dtype: torch.dtype
    max_model_len: int
    tensor_parallel_size: int
    decode_context_parallel_size: int
    cache_dtype: str
    lora: bool

    def file(self, name: str) -> Path | None:
        """A file of the checkpoint's folder; None where there is none, or the hub cannot be asked."""
        folder = Path(self.model)
        if folder.is_dir():
            path = folder / name
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.model, name, revision=self.revision))
        except (OSError, ValueError):  # what the hub's own errors are
            return None


def check_request(request: Request, section: CompressedSection) -> None:
    """Raises UsageError for what vLLM is asked for and this checkpoint cannot do."""
    shape = attention_shape(request.hf_config)
    check_size(section.layouts(shape), shape, request.tensor_parallel_size)
    policy = getattr(section, "cache", None)
    if policy is not None:
        raise UsageError(
            f"{request.model}: exported with a cache policy ({policy.get('method', policy)}), which vLLM's cache "
            "cannot keep.",
            "Export it without --cache, or serve with transformers.",
        )
    if request.cache_dtype != "auto":
        raise UsageError(
            f"--kv-cache-dtype {request.cache_dtype}: what a compressed checkpoint caches has its own bits per channel "
            "already.",
            "Leave it out, or export with fewer bits.",
        )
    if request.lora:
        raise UsageError(
            "LoRA: adapters are trained on projections that compression has rewritten.",
            "Merge the adapter into the source model and compress that.",
        )
    if request.decode_context_parallel_size > 1:
        raise UsageError(
            "--decode-context-parallel-size: not supported for compressed checkpoints.", "Use tensor parallelism."
        )


def separate_stores(request: Request, transfer: Any) -> None:
    """Keep prefixes in external stores apart by checkpoint and dtype; see stores.keep_apart.

    Args:
        transfer: vLLM's KVTransferConfig, or None.
    Raises:
        UsageError: the checkpoint has no manifest, or see there.
        CheckpointError: a file is not what its manifest says.
    """
    if transfer is None or transfer.kv_connector is None:
        return
    path = request.file(MANIFEST)
    if path is None:
        raise UsageError(
            f"--kv-transfer-config: {request.model} has no {MANIFEST}, by whose digest stored prefixes are kept apart.",
            "Serve the folder as `rotor export` wrote it.",
        )
    # The hub's own snapshots are links, and known by their hashes.
    digest = checked_digest(path.parent) if Path(request.model).is_dir() else file_sha256(path)
    keep_apart(transfer, prefix_mark(digest, str(request.dtype).removeprefix("torch.")))


@lru_cache(maxsize=4)
def checked_digest(folder: Path) -> str:
    """The digest of a folder's manifest; raises CheckpointError where a file is not what it says. Once a process."""
    manifest = Manifest.read(folder)
    wrong = [f"{name} {problem}" for name in sorted(manifest.files) if (problem := manifest.problem(name))]
    if wrong:
        raise CheckpointError(f"{folder}: {'; '.join(wrong)}.", "Run `rotor validate`; export it again.")
    return manifest.digest
