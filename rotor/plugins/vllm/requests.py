"""What vLLM is asked for, looked at before anything is built: refused where a compressed checkpoint cannot do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from ...errors import UsageError
from ...format.hashes import file_sha256
from ...format.manifest import MANIFEST
from ...format.section import CompressedSection, is_compressed
from ...runtime.families import attention_shape
from .shards import check_size
from .stores import keep_apart, prefix_mark


def watch(architecture: str) -> None:
    """Have vLLM look at each request for a compressed model of an architecture, after what it does for the native.

    Under the native's name, by which vLLM looks before it asks what the checkpoint is quantised by; others pass.
    """
    native = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)

    class Requests(native):  # type: ignore[misc, valid-type]
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            native.verify_and_update_config(vllm_config)
            hf_config = vllm_config.model_config.hf_config
            stored: Any = getattr(hf_config, "quantization_config", None)
            if is_compressed({"quantization_config": stored}):
                section, chosen = CompressedSection(**stored), getattr(hf_config, "rank_profile", None)
                check_request(vllm_config, section, chosen)
                separate_stores(vllm_config, section.profile_ranks(chosen))

    MODELS_CONFIG_MAP[architecture] = Requests


def check_request(vllm_config: Any, section: CompressedSection, profile: Any) -> None:
    """Raises UsageError for what vLLM is asked for and this checkpoint cannot do."""
    shape = attention_shape(vllm_config.model_config.hf_config)
    layouts = section.cut_layouts(shape, profile)  # refuses a profile that there is not
    check_size(layouts, shape, vllm_config.parallel_config.tensor_parallel_size)
    policy = getattr(section, "cache", None)
    if policy is not None:
        raise UsageError(
            f"{vllm_config.model_config.model}: exported with a cache policy ({policy.get('method', policy)}), which "
            "vLLM's cache cannot keep.",
            "Export it without --cache, or serve with transformers.",
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype != "auto":
        raise UsageError(
            f"--kv-cache-dtype {cache_dtype}: what a compressed checkpoint caches has its own bits per column already.",
            "Leave it out, or export with fewer bits.",
        )
    if vllm_config.lora_config is not None:
        raise UsageError(
            "LoRA: adapters are trained on projections that compression has rewritten.",
            "Merge the adapter into the source model and compress that.",
        )
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        raise UsageError(
            "--decode-context-parallel-size: not supported for compressed checkpoints.", "Use tensor parallelism."
        )


def separate_stores(vllm_config: Any, ranks: Any) -> None:
    """Keep prefixes in external stores apart by checkpoint, profile and dtype; see stores.keep_apart.

    Args:
        ranks: of the profile that is loaded, None where there are none.
    Raises:
        UsageError: the checkpoint has no manifest, or see there.
    """
    transfer, model_config = vllm_config.kv_transfer_config, vllm_config.model_config
    if transfer is None or transfer.kv_connector is None:
        return
    manifest = beside_weights(model_config, MANIFEST)
    if manifest is None:
        raise UsageError(
            f"--kv-transfer-config: {model_config.model} has no {MANIFEST}, by whose digest stored prefixes are kept "
            "apart.",
            "Serve the folder as `rotor export` wrote it.",
        )
    dtype = str(model_config.dtype).removeprefix("torch.")
    keep_apart(transfer, prefix_mark(file_sha256(manifest), ranks, dtype))


def beside_weights(model_config: Any, name: str) -> Path | None:
    """A file of the checkpoint's folder; None where there is none, or the hub cannot be asked."""
    folder = Path(model_config.model)
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_config.model, name, revision=model_config.revision))
    except (OSError, ValueError):  # what the hub's own errors are
        return None
