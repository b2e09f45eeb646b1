"""Load a checkpoint's weights, all of them or one layer at a time, after checking that they fit its config."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.families import family_of
from ..checkpoint.section import is_compressed
from ..errors import CheckpointError, RotorError
from ..numerics import check_parameters
from .compressed import CompressedCheckpoint, open_model
from .source import Checkpoint, one_line, only_cache_is_quantised
from .weights import StreamedWeights, Weights, auto_class, keep_softcap

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CHECK_CONFIG = "Check that config.json belongs to these weights."
MAX_SIZE_FACTOR = 4
"""A model may have this many times the elements of its shards: compression removes some, and tied ones are stored
once. Without the bound a damaged config.json could ask for more memory than there is."""

ALWAYS_ALLOWED_ELEMENTS = 1 << 26
"""Elements that any model may have, because position tables may be larger than a tiny model."""


def config_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a copy of a config on the meta device."""
    with torch.device("meta"):  # eager, because Falcon looks up its attention class by the implementation
        return auto_class(config).from_config(deepcopy(config), trust_remote_code=False, attn_implementation="eager")


def check_fit(checkpoint: Checkpoint) -> None:
    """Compare the shapes that the config implies with those of the shards, on the meta device.

    Raises:
        CheckpointError: a tensor has another shape than config.json implies (names it, with both), or the model would
            be far larger than the shards.
    """
    where, config = checkpoint.folder / "config.json", checkpoint.config
    try:
        model = config_model(config)
    except Exception as error:  # model code raises anything for sizes that it does not expect
        raise CheckpointError(
            f"{where}: transformers cannot build this model: {type(error).__name__}: {one_line(error)}",
            "Check config.json, or install a version of transformers that knows this model.",
        ) from error
    held = sum(torch.Size(checkpoint.shape_of(name)).numel() for name in checkpoint.names)
    for kind, tensors in (("parameters", model.parameters()), ("buffers", model.buffers())):
        wanted = sum(tensor.numel() for tensor in tensors)
        if wanted > max(MAX_SIZE_FACTOR * held, ALWAYS_ALLOWED_ELEMENTS):
            raise CheckpointError(
                f"{where}: describes a model of {wanted} elements in {kind}, the shards hold {held}.", CHECK_CONFIG
            )
    if is_compressed(checkpoint.config_dict):
        return  # compressed modules have other shapes, which the quantiser checks
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in checkpoint.names and list(parameter.shape) != checkpoint.shape_of(name):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {checkpoint.shape_of(name)}, config.json implies "
                f"{list(parameter.shape)}.",
                CHECK_CONFIG,
            )


def load_model(folder: str | Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a model for evaluation, from a local folder, without running code from it.

    Raises:
        CheckpointError: the folder cannot be loaded.
    """
    checkpoint = open_model(folder)
    check_fit(checkpoint)
    whole = only_cache_is_quantised(checkpoint.config_dict.get("quantization_config"))
    given: dict[str, Any] = {"config": deepcopy(checkpoint.config)} if whole else {}
    try:
        loaded: Any = auto_class(checkpoint.config).from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True, **given
        )
    except RotorError:
        raise
    except Exception as error:  # the loaders and models of transformers raise errors of many kinds
        raise CheckpointError(f"{folder}: transformers cannot load it: {one_line(error)}") from error
    model, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = set(report.get(kind, ())) - checkpoint.unused
        if keys:
            shown = ", ".join(map(str, sorted(keys)))[:300]
            raise CheckpointError(f"{folder}: {kind.replace('_', ' ')} on loading: {shown}.", CHECK_CONFIG)
    check_parameters(model, str(folder))
    keep_softcap(model)
    return model.eval().to(device)


def weights_of(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, streamed: bool) -> Weights:
    """Open the weights of a source model or of a compressed checkpoint, all in memory or one layer at a time."""
    if not streamed:
        return Weights(load_model(checkpoint.folder, device, dtype))
    check_fit(checkpoint)

    def prepare(model: PreTrainedModel) -> None:
        if isinstance(checkpoint, CompressedCheckpoint):
            from ..runtime.replacement import replace_attention  # not needed for source models

            layouts = dict(enumerate(checkpoint.layouts))
            biases = frozenset(checkpoint.section.biases)
            for module in replace_attention(model, family_of(model.config), checkpoint.shape, layouts, biases):
                module.to(dtype)  # weights are loaded in the dtype of the parameters

    return StreamedWeights(checkpoint, device, dtype, prepare)
