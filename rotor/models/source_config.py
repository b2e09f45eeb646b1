"""What config.json and generation_config.json of unknown origin may say, checked before transformers sees them.

transformers builds lists, tables and modules from these files, fetches code that they name from the hub, and lets them
change what a forward pass returns. Checked here is what would do so; everything else is transformers' to judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checked import shorten
from ..errors import CheckpointError, UnsupportedModelError
from ..format.section import is_ours

DAMAGED = "The file is damaged; download it again."
REMOVE = "Remove it from the file."
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels", "num_experts", "num_local_experts")
BOUNDS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(COUNTS, (0, 1 << 14)),
    "vocab_size": (1, 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (2, 1 << 31)),
}
"""Fields of config.json that say how many of something there are, with the least and the most of any model."""

OUTPUT_FLAGS = ("output_attentions", "output_hidden_states", "torchscript", "is_encoder_decoder")
"""Fields of config.json that change what a forward pass returns, unless they are false."""

IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention", "rotor"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""What may be named: functions that are in transformers and rotor. Of any other name, also those of flash attention
where it is not installed, transformers fetches a kernel from the hub and runs it."""

GENERATION_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("max_length", "min_length", "max_new_tokens", "min_new_tokens"), (0, 1 << 31)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1, 1 << 10)),
    "top_k": (-1, 1 << 24),
    **dict.fromkeys(("temperature", "repetition_penalty", "length_penalty", "top_p", "typical_p"), (-1e6, 1e6)),
}
GENERATION_FLAGS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_TOKEN_ID = 1 << 31


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Look through config.json.

    Args:
        path: names the file in errors. config: what is in it.
    Raises:
        CheckpointError: a count out of all bounds, an id that is none, code on the hub, or another file of weights.
        UnsupportedModelError: it asks the model to return something else.
    """
    for key, (least, most) in BOUNDS.items():
        value = config.get(key)
        if value is not None and _is_number(value) and not least <= value <= most:
            raise CheckpointError(f"{path}: {key} is {shorten(value)}, expected {least} to {most}.", DAMAGED)
    for key, usual in (("return_dict", True), *((flag, False) for flag in OUTPUT_FLAGS)):
        if config.get(key) is not None and config[key] is not usual:
            raise UnsupportedModelError(
                f"{path}: {key} is {shorten(config[key])}, which changes what the model returns; expected {usual} or "
                "nothing.",
                REMOVE,
            )
    if config.get("transformers_weights") is not None:
        raise CheckpointError(
            f"{path}: transformers_weights names {shorten(config['transformers_weights'])}; rotor reads the weights "
            "under their usual names alone.",
            "Remove it from config.json, and rename the files.",
        )
    _check_token_ids(path, config)
    for key, value in _entries(config):
        known = IMPLEMENTATIONS.get(key.removeprefix("_").removesuffix("_internal"), ())
        named = list(value.values()) if isinstance(value, dict) else [value]
        if known and any(name is not None and not _is_known(name, known) for name in named):
            raise CheckpointError(
                f"{path}: {key} is {shorten(value)}, expected one of {', '.join(known)}: other names are code that "
                "transformers would fetch from the hub.",
                REMOVE,
            )


def check_generation_config(path: Path, config: dict[str, Any]) -> None:
    """Look through generation_config.json, which a compressed checkpoint takes along.

    Raises:
        CheckpointError: a value that generation cannot use, or that asks for absurd amounts.
    """
    for key, (least, most) in GENERATION_BOUNDS.items():
        value = config.get(key)
        if value is not None and not (_is_number(value) and math.isfinite(value) and least <= value <= most):
            raise CheckpointError(
                f"{path}: {key} is {shorten(value)}, expected a number from {least:g} to {most:g}.",
                "Correct or remove the file.",
            )
    for key in GENERATION_FLAGS:
        if config.get(key) not in (None, False):
            raise CheckpointError(
                f"{path}: {key} is {shorten(config[key])}, which rotor's checkpoints cannot return.", REMOVE
            )
    _check_token_ids(path, config)
    from transformers import GenerationConfig  # loads most of transformers, which reading headers does not need

    try:
        GenerationConfig.from_dict(dict(config))
    except Exception as error:  # whatever transformers makes of values that it does not expect
        raise CheckpointError(
            f"{path}: transformers cannot read it: {' '.join(str(error).split())[:300]}", "Correct or remove the file."
        ) from error


def _check_token_ids(path: Path, config: dict[str, Any]) -> None:
    for key in TOKEN_IDS:
        value = config.get(key)
        ids = value if isinstance(value, list) else [value]
        if len(ids) > 1 << 10 or not all(i is None or (type(i) is int and abs(i) <= MAX_TOKEN_ID) for i in ids):
            raise CheckpointError(f"{path}: {key} is {shorten(value)}, expected a token id or a list of them.", DAMAGED)


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


def _is_known(name: Any, known: tuple[str, ...]) -> bool:
    """rotor's own checkpoints name its attention with a hint beside it (see rotor.format.section)."""
    return isinstance(name, str) and (name in known or (is_ours(name) and "/" not in name))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
