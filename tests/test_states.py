"""Bytes of states beside the KV cache, against those of a model that has read a text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_models import MULTIMODAL, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from rotor.models.outline import state_bytes

HYBRIDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_are_those_of_a_model_that_has_read_a_text(name: str, dtype: torch.dtype) -> None:
    config: Any = tiny_config(name)
    config.dtype = config.get_text_config().dtype = dtype
    auto_class = AutoModelForImageTextToText if name in MULTIMODAL else AutoModelForCausalLM
    before = config.to_dict()
    counted = state_bytes(config)
    assert config.to_dict() == before

    model = auto_class.from_config(config, dtype=dtype).eval()
    cache: Any = DynamicCache(config=config)
    with torch.inference_mode():
        model(torch.arange(1, 24)[None], past_key_values=cache, use_cache=True)
    held = [value for layer in cache.layers for entry in vars(layer).values() for value in tensors_of(entry)]
    keys_and_values = [
        x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
    ]
    assert counted == sum(x.nbytes for x in held) - sum(x.nbytes for x in keys_and_values if x is not None)
    assert counted > 0


def tensors_of(entry: object) -> list[Tensor]:
    entries = entry.values() if isinstance(entry, dict) else [entry]
    return [value for value in entries if isinstance(value, Tensor)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3"])
def test_attention_alone_has_none(name: str) -> None:
    assert state_bytes(tiny_config(name)) == 0


def test_mamba_layers_by_hand() -> None:
    """Two layers: a convolution of four over inner channels and both B and C, and a state of each inner channel."""
    inner, state, groups, bytes_of_float32 = 8 * 32, 8, 1, 4
    assert state_bytes(tiny_config("bamba")) == 2 * bytes_of_float32 * (
        4 * (inner + 2 * groups * state) + inner * state
    )
