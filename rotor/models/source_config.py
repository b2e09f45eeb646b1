"""Check a config.json of unknown origin before transformers reads it.

transformers sizes lists, tables and modules by this file, fetches code that the file names from the hub, and lets it
change the outputs of a forward pass. Only fields with such an effect are checked here; transformers checks the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ..checked import JsonObject, Reader, shorten
from ..checkpoint.section import is_ours
from ..errors import CheckpointError

HINT = "Correct or remove it, or download the file again."
IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention", "rotor"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""Allowed names: functions that are part of transformers or rotor. For any other name (also flash attention's, if that
is not installed) transformers fetches a kernel from the hub and runs it."""


TokenId = Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] | None
UNSET = Literal[False] | None
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels", "num_experts", "num_local_experts")
OUTPUTS = ("output_attentions", "output_hidden_states", "torchscript")
FIELD_TYPES = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), TokenId | list[TokenId]),
    **dict.fromkeys(OUTPUTS, UNSET),
    **dict.fromkeys(COUNTS, Annotated[int, Field(ge=0, le=1 << 14)] | None),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), Annotated[int, Field(ge=2, le=1 << 31)] | None),
    "vocab_size": Annotated[int, Field(ge=1, le=1 << 24)] | None,
    "return_dict": Literal[True] | None,
    "transformers_weights": None,
}
"""Types of the checked fields. `transformers_weights` must be unset: weights are only read under their usual names."""

ConfigFields = TypedDict("ConfigFields", FIELD_TYPES, total=False)  # type: ignore[misc]


def check_config(path: Path, config: JsonObject) -> None:
    """Check the fields of config.json.

    Args:
        path: file name for errors.
        config: content of the file.
    Raises:
        CheckpointError: a field of FIELD_TYPES has another type or value, or the file names code on the hub.
    """
    Reader(str(path), CheckpointError, HINT).read(ConfigFields, config)
    for key, value in _entries(config):
        known = IMPLEMENTATIONS.get(key.removeprefix("_").removesuffix("_internal"))
        for name in value.values() if isinstance(value, dict) else [value]:
            if known and name is not None and name not in known and not (is_ours(name) and "/" not in name):
                raise CheckpointError(
                    f"{path}: {key} is {shorten(value)}, expected one of {', '.join(known)}: other names are code that "
                    "transformers would fetch from the hub.",
                    HINT,
                )


def _entries(config: JsonObject) -> Iterator[tuple[str, Any]]:
    """All keys and values at any depth, because sub-configs are read too."""
    stack: list[object] = [config]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield from node.items()
            stack += node.values()
        elif isinstance(node, list):
            stack += node
