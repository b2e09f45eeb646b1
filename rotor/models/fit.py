"""Whether the tensors of a checkpoint fit its config, found on the meta device, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..errors import CheckpointError
from ..format.section import is_compressed
from .checkpoint import Checkpoint

LARGEST_SHARE = 4
"""How many times the elements that the shards hold a model may have: a compressed one has lost some, tied ones are
stored once. Without the bound a damaged config.json could ask for more memory than there is."""

SMALLEST_BOUND = 1 << 26
"""Elements that any model may have; buffers of position tables may outweigh a tiny model."""


def check_fit(checkpoint: Checkpoint) -> None:
    """Compare shapes of parameters that model and shards both have, and the size of the whole.

    Raises:
        CheckpointError: a tensor has another shape than config.json implies (names it, with both), or the model would
            be far larger than the shards.
    """
    where = checkpoint.folder / "config.json"
    try:
        with torch.device("meta"):
            # eager, since Falcon looks its attention class up by the implementation, which may be rotor's
            model: Any = AutoModelForCausalLM.from_config(
                checkpoint.config, trust_remote_code=False, attn_implementation="eager"
            )
    except CheckpointError:
        raise
    except Exception as error:  # whatever a model's own code makes of sizes that it does not expect
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{where}: transformers cannot build this model: {type(error).__name__}: {text}",
            "Check config.json, or install a version of transformers that knows this model.",
        ) from error
    held = sum(torch.Size(checkpoint.shape_of(name)).numel() for name in checkpoint.names)
    for kind, tensors in (("parameters", model.parameters()), ("buffers", model.buffers())):
        wanted = _elements(tensors)
        if wanted > max(LARGEST_SHARE * held, SMALLEST_BOUND):
            raise CheckpointError(
                f"{where}: describes a model of {wanted} elements in {kind}, the shards hold {held}.",
                "Check that config.json belongs to these weights.",
            )
    if is_compressed(checkpoint.config_dict):
        return  # its modules have other shapes, which the quantiser checks
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in checkpoint.names and list(parameter.shape) != checkpoint.shape_of(name):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {checkpoint.shape_of(name)}, config.json implies "
                f"{list(parameter.shape)}.",
                "Check that config.json belongs to these weights.",
            )


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
