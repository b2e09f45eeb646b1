"""What a config.json of unknown origin may say, checked before transformers sees it.

transformers builds lists, tables and modules from this file, fetches code that it names from the hub, and lets it
change what a forward pass returns. Only what would do so is checked here; transformers checks the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ..checked import Reader, shorten
from ..checkpoint.section import is_ours
from ..errors import CheckpointError

HINT = "Correct or remove it, or download the file again."
IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention", "rotor"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""What may be named: functions that are in transformers and rotor. Of any other name, also those of flash attention
where it is not installed, transformers fetches a kernel from the hub and runs it."""


TokenId = Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] | None
UNSET = Literal[False] | None
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels", "num_experts", "num_local_experts")
OUTPUTS = ("output_attentions", "output_hidden_states", "torchscript", "is_encoder_decoder")
CONFIG = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), TokenId | list[TokenId]),
    **dict.fromkeys(OUTPUTS, UNSET),
    **dict.fromkeys(COUNTS, Annotated[int, Field(ge=0, le=1 << 14)] | None),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), Annotated[int, Field(ge=2, le=1 << 31)] | None),
    "vocab_size": Annotated[int, Field(ge=1, le=1 << 24)] | None,
    "return_dict": Literal[True] | None,
    "transformers_weights": None,
}
"""Fields with the values of any model; weights are read under their usual names alone."""

ConfigFields = TypedDict("ConfigFields", CONFIG, total=False)  # type: ignore[misc]


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Look through config.json.

    Args:
        path: names the file in errors. config: what is in it.
    Raises:
        CheckpointError: a field of CONFIG has another value, or the file names code on the hub.
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


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All keys and values, wherever they stand: sub-configs hand theirs on."""
    stack: list[Any] = [config]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield from node.items()
            stack += node.values()
        elif isinstance(node, list):
            stack += node
