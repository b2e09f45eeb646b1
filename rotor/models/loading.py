"""Loading a checkpoint's weights: all of them, or one layer at a time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import is_accelerate_available

from ..errors import CheckpointError, RotorError, UsageError
from ..numerics import check_parameters
from ..runtime.families import FAMILIES, find_family
from ..runtime.integration import replace_attention
from .checkpoint import Checkpoint
from .compressed import CompressedCheckpoint
from .fit import check_fit
from .weights import ResidentWeights, StreamedWeights, Weights, keep_softcap


def load_model(
    folder: Any,
    device: torch.device,
    dtype: torch.dtype,
    config_changes: dict[str, Any] | None = None,
    device_map: str | None = None,
) -> Any:
    """Load a causal model for evaluation, from a local folder, without running code from it.

    Args:
        device_map: as in transformers' from_pretrained; it then decides in place of `device`.
    Raises:
        UsageError: a device map without accelerate, or one that leaves weights outside of the GPUs.
        CheckpointError: the folder cannot be loaded.
    """
    check_fit(Checkpoint(folder))
    if device_map is not None:
        if not is_accelerate_available():
            raise UsageError(
                f"--device-map {device_map}: the package accelerate is not installed.",
                "Install it: pip install accelerate",
            )
        config_changes = {**(config_changes or {}), "device_map": device_map}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **(config_changes or {}),
        )
    except RotorError:
        raise
    except Exception as error:  # the loaders and models of transformers have errors of their own
        raise CheckpointError(f"{folder}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from error
    model, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise CheckpointError(
                f"{folder}: {kind.replace('_', ' ')} on loading: {', '.join(map(str, sorted(report[kind])))[:300]}.",
                "Check that config.json belongs to these weights.",
            )
    check_parameters(model, str(folder))
    keep_softcap(model)
    if device_map is None:
        return model.eval().to(device)
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise UsageError(
            f"--device-map {device_map}: the GPUs do not hold the model (it would lie on {', '.join(sorted(places))}).",
            "Leave --device-map out: rotor then reads one layer of weights at a time.",
        )
    return model.eval()


def weights_of(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, streamed: bool, device_map: str | None = None
) -> Weights:
    """Open a checkpoint's weights, all in memory or one layer at a time."""
    if streamed:
        check_fit(checkpoint)
        return StreamedWeights(checkpoint, find_family(checkpoint.config), device, dtype)
    return ResidentWeights(load_model(checkpoint.folder, device, dtype, device_map=device_map))


def compressed_weights(
    checkpoint: CompressedCheckpoint, device: torch.device, dtype: torch.dtype, streamed: bool
) -> Weights:
    """Open the weights of a checkpoint that rotor wrote, as `weights_of` does."""
    if not streamed:
        return weights_of(checkpoint, device, dtype, False)
    family, layouts = FAMILIES[checkpoint.config.model_type], dict(enumerate(checkpoint.layouts))

    def prepare(model: Any) -> None:
        for module in replace_attention(model, family, checkpoint.shape, layouts, frozenset(checkpoint.section.biases)):
            module.to(dtype)  # weights are loaded in the dtype that the parameters have

    return StreamedWeights(checkpoint, family, device, dtype, prepare)
