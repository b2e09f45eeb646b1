"""What config.json and generation_config.json of unknown origin may say, checked before transformers sees them.

transformers builds lists, tables and modules from these files, fetches code that they name from the hub, and lets them
change what a forward pass returns. Checked here is what would do so; everything else is transformers' to judge.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..checked import shorten
from ..errors import CheckpointError, UnsupportedModelError
from ..format.section import is_ours

DAMAGED = "The file is damaged; download it again."
BOUNDS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "num_labels",
            "num_experts",
            "num_local_experts",
        ),
        (0, 1 << 14),
    ),
    "vocab_size": (1, 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (2, 1 << 31)),
}
"""Fields of config.json that say how many of something there are, with the least and the most of any model."""

OUTPUT_FLAGS: dict[str, tuple[Any, ...]] = {
    "return_dict": (None, True),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "torchscript", "is_encoder_decoder"), (None, False)),
}
"""Fields of config.json that change what a forward pass returns, with the values that leave it as rotor reads it."""

ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
EXPERT_KEYS = ("experts_implementation", "_experts_implementation", "_experts_implementation_internal")
ATTENTIONS = ("eager", "sdpa", "flex_attention", "rotor")
"""What config.json may name as attention: functions that are in transformers and rotor. Of any other name, also those
of flash attention where it is not installed, transformers fetches a kernel from the hub and runs it."""

EXPERTS = ("eager", "batched_mm", "grouped_mm")
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
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not least <= value <= most:
            raise CheckpointError(f"{path}: {key} is {shorten(value)}, expected {least} to {most}.", DAMAGED)
    for key, allowed in OUTPUT_FLAGS.items():
        if not any(config.get(key) is value for value in allowed):
            raise UnsupportedModelError(
                f"{path}: {key} is {shorten(config[key])}, which changes what the model returns; expected "
                f"{allowed[1]} or nothing.",
                "Remove it from config.json.",
            )
    if config.get("transformers_weights") is not None:
        raise CheckpointError(
            f"{path}: transformers_weights names {shorten(config['transformers_weights'])}; rotor reads the weights "
            "under their usual names alone.",
            "Remove it from config.json, and rename the files.",
        )
    _check_token_ids(path, config)
    _check_implementations(path, config)


def check_generation_config(path: Path, config: dict[str, Any]) -> None:
    """Look through generation_config.json, which a compressed checkpoint takes along.

    Raises:
        CheckpointError: a value that generation cannot use, or that asks for absurd amounts.
    """
    for key, (least, most) in GENERATION_BOUNDS.items():
        value = config.get(key)
        if value is not None and not _in_range(value, least, most):
            raise CheckpointError(
                f"{path}: {key} is {shorten(value)}, expected a number from {least:g} to {most:g}.",
                "Correct or remove the file.",
            )
    for key in GENERATION_FLAGS:
        if config.get(key) not in (None, False):
            raise CheckpointError(
                f"{path}: {key} is {shorten(config[key])}, which rotor's checkpoints cannot return.",
                "Remove it from the file.",
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


def _check_implementations(path: Path, config: dict[str, Any]) -> None:
    """Refuse names of kernels, wherever they stand: sub-configs hand theirs on."""
    stack: list[Any] = [config]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        if not isinstance(node, dict):
            continue
        stack += node.values()
        for keys, known in ((ATTENTION_KEYS, ATTENTIONS), (EXPERT_KEYS, EXPERTS)):
            for key in keys:
                value = node.get(key)
                named = list(value.values()) if isinstance(value, dict) else [value]
                if any(name is not None and not _is_known(name, known) for name in named):
                    raise CheckpointError(
                        f"{path}: {key} is {shorten(value)}, expected one of {', '.join(known)}: "
                        "other names are code that transformers would fetch from the hub.",
                        "Remove it from config.json.",
                    )


def _is_known(name: Any, known: tuple[str, ...]) -> bool:
    """rotor's own checkpoints name its attention with a hint beside it (see rotor.format.section)."""
    return isinstance(name, str) and (name in known or (is_ours(name) and "/" not in name))


def _in_range(value: Any, least: float, most: float) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and least <= value <= most
