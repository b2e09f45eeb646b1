"""A model that reads the past through a cache: a prompt, then the rest of each row in steps (teacher forcing).

A pass over whole rows never reads what a quantising or evicting cache has stored. Here every scored prediction does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ...errors import DataError, UsageError
from ...models.hardware import fast_products
from ...models.layerwise import LayerwiseModel
from ...progress import Advance

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...policies import Policy

LONGEST_STEP = 64
"""Tokens of a step where any number would do."""


def prefill_of(answers: Tensor) -> int:
    """The longest prefill after which every answer is read through the cache, for answers [rows, seq_len] bool.

    The token before an answer predicts it, and must come after the prefill.

    Raises:
        DataError: there is no answer, or one of the first two tokens is one.
    """
    positions = answers.any(0).nonzero()
    if len(positions) == 0 or int(positions[0]) < 2:
        raise DataError("cached scoring needs answers, and at least two tokens before the first.")
    return int(positions[0]) - 1


def constant_rope_tokens(config: PreTrainedConfig) -> int | None:
    """Tokens of a sequence up to which RoPE's frequencies stay as they are; None where they never change.

    Beyond these, keys that a cache holds keep the frequencies of their pass, and one pass over a whole row gives all
    tokens those of its end.
    """
    text_config = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    most = []
    for part in (rope, *rope.values()):  # of all layers, or by their type
        kind = str(part.get("rope_type")) if isinstance(part, dict) else ""
        if kind == "longrope":
            most.append(part["original_max_position_embeddings"])
        elif "dynamic" in kind and not part.get("alpha"):  # a fixed alpha (Hunyuan) stretches the base for all lengths
            most.append(text_config.max_position_embeddings)
    return min(most, default=None)


def check_steps_in_memory(network: LayerwiseModel, length: int, most: int) -> None:
    """Raises UsageError where weights are read layer by layer, and rows have to be read step by step."""
    if network.source.streamed:
        raise UsageError(
            f"rows of {length} tokens: the frequencies of this model's RoPE change behind {most}, so that accuracy is "
            "measured token by token, which needs all weights in memory.",
            f"Give --set evaluation.seq_len={most}, or --offload never on a machine that can hold them.",
        )


def check_in_memory(network: LayerwiseModel, policy: Policy) -> None:
    """Raises UsageError where weights are read layer by layer: what a policy does shows only step by step."""
    if network.source.streamed:
        raise UsageError(
            f"cache policy {policy.method}: is measured step by step, which needs all weights in memory.",
            "Give --offload never on a machine that can hold them, or --cache none.",
        )


@torch.inference_mode()
def final_states_through_cache(
    network: LayerwiseModel,
    rows: Tensor,
    prefill: int,
    policy: Policy | None = None,
    advance: Advance = lambda done: None,
    *,
    step: int | None = None,
) -> Tensor:
    """Hidden states that leave the last layer, as `LayerwiseModel.final_states`, where the cache follows a policy.

    Tokens behind the prefill read what is stored of those before them.

    Args:
        rows: [n, seq_len]. prefill: tokens of the first step.
        step: tokens of each later one; by default as many as see what they would see one by one.
    Raises:
        UsageError: weights are read layer by layer.
    """
    from ...policies import cache_policy  # all methods of caches, which most measurements need none of

    if policy is not None:
        check_in_memory(network, policy)
        step = step or policy.longest_step
    step, length = step or LONGEST_STEP, rows.shape[1]
    states = network.states_like(rows)
    outputs = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).cpu())

    handle = network.layers[-1].register_forward_hook(keep)
    steps = [slice(0, prefill)]
    steps += [slice(start, min(start + step, length)) for start in range(prefill, length, step)]
    try:
        with cache_policy(network.model, policy), fast_products(network.device):
            for part in network.batches(rows):
                cache = DynamicCache(config=network.config)
                for columns in steps:
                    inputs = rows[part, columns].to(network.device)
                    network.decoder(input_ids=inputs, past_key_values=cache, use_cache=True)
                    states[part, columns] = outputs.pop()
                    advance(inputs.numel())
    finally:
        handle.remove()
    return states
