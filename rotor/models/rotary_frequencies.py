"""The frequencies of a model's RoPE from its config, where they are the same at every length."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..runtime.families import FAMILIES, attention_shape

FIXED = ("linear", "yarn", "llama3")
"""Kinds of scaled RoPE whose frequencies follow from the config alone."""


def rotary_frequencies(config: Any, layer: int) -> tuple[float, ...] | None:
    """Radians by which each plane of a head turns from one position to the next; none in a model without RoPE.

    Args:
        config: of transformers, of a supported family.
    Returns:
        None where frequencies depend on the length of a sequence.
    """
    family, shape = FAMILIES[config.model_type], attention_shape(config)
    if not shape.rotary_dim:
        return ()
    kind = family.rotary_type(config, layer)
    rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64) / shape.rotary_dim
        return tuple((float(rope["rope_theta"]) ** -exponents).tolist())
    if rope["rope_type"] not in FIXED:
        return None
    inverse, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind)
    return tuple(inverse.double().tolist())
