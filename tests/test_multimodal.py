"""Models that read more than text: their language model is compressed in place, and everything else is copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compare import relative_error
from support.quick import mostly_nightly
from support.runs import WITH_EXACT, in_memory, whole_ranks
from support.tiny_models import MULTIMODAL, build_tiny, tiny_config
from transformers import AutoModelForImageTextToText

import rotor
from rotor import inspect
from rotor.checkpoint.families import MULTIMODAL as SUPPORTED
from rotor.errors import UnsupportedModelError
from rotor.policies import PolicyLayer, Streaming, cache_policy, use_cache_policy

PROMPT = torch.randint(8, 4096, (2, 20), generator=torch.Generator().manual_seed(5))
IMAGE_TOKEN, START, END = 5, 6, 7
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def with_image(name: str) -> dict[str, Any]:
    """A prompt with an image of four tokens, as the model's processor would give it."""
    image = torch.tensor([[START, *[IMAGE_TOKEN] * 4, END]])
    ids = torch.cat([PROMPT[:1, :6], image, PROMPT[:1, 6:]], dim=1)
    kinds = (ids == IMAGE_TOKEN).int()
    generator = torch.Generator().manual_seed(7)
    if name == "gemma3":
        pixels = torch.randn(1, 3, 28, 28, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": kinds}
    if name in ("gemma4", "gemma4_unified"):  # four places a token, or one
        side = 4 if name == "gemma4" else 2
        places = torch.tensor([[[x, y] for y in range(side) for x in range(side)]])
        pixels = torch.rand(1, side**2, 3 * 14 * 14, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
    if name == "llama4":
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 56, 56, generator=generator)}
    if name == "mistral3":
        pixels = torch.randn(1, 3, 56, 56, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[56, 56]])}
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
    grid = torch.tensor([[1, 4, 4]])
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def test_every_kind_has_a_tiny_model() -> None:
    assert MULTIMODAL.keys() == SUPPORTED.keys()


@pytest.mark.parametrize("name", mostly_nightly(MULTIMODAL, lambda name: name in ("gemma3", "qwen3_vl")))
def test_the_language_model_goes_through_the_whole_pipeline(name: str, tmp_path: Path) -> None:
    model = build_tiny(name, tmp_path / "model")
    run = rotor.calibrate(model, tmp_path / "run", "rotor", WITH_EXACT, offload="always")
    (tmp_path / "config").mkdir()
    shutil.copy(model / "config.json", tmp_path / "config")
    found = inspect(tmp_path / "config", overrides=WITH_EXACT)
    assert (found.model_type, found.shape, found.form) == (name, run.shape, run.form.in_words(run.shape))

    network = in_memory(run)
    whole = whole_ranks(run)
    exact = run.recipe.exact.tokens
    pictured = with_image(name)
    with torch.inference_mode():
        source = network.model
        text, image = source(PROMPT).logits, source(**pictured).logits
        assert relative_error(source(pictured["input_ids"]).logits, image) > 1e-2
        written = [source.generate(PROMPT, **GREEDY), source.generate(**pictured, **GREEDY)]
        for kept in [exact] if run.shape.needs_exact else [None, exact]:
            same = network.compress(run.bases(), whole, kept)
            assert relative_error(same(PROMPT, use_cache=False).logits, text) < 1e-5
            assert relative_error(same(**pictured, use_cache=False).logits, image) < 1e-5
            assert torch.equal(same.generate(PROMPT, **GREEDY), written[0])
            assert torch.equal(same.generate(**pictured, **GREEDY), written[1])

    out = tmp_path / "out"
    rotor.export(run.folder, out, compression=0.6, measure=False, context=12)
    result = rotor.validate(out, measure=False)
    assert not result.damaged, [check for check in result.checks if check.status == "fail"]
    assert "AutoModelForImageTextToText.from_pretrained" in (out / "README.md").read_text()
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    others = [tensor for tensor in before if "layers" not in tensor or "vision_tower" in tensor]
    assert any("vis" in tensor for tensor in others)
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in others)

    compressed: Any = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    compressed.save_pretrained(tmp_path / "again")
    again: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    for inputs in ({"input_ids": PROMPT}, pictured):
        tokens = compressed.generate(**inputs, **GREEDY)
        assert torch.equal(again.generate(**inputs, **GREEDY), tokens)
        assert torch.equal(compressed.generate(**inputs, cache_implementation="static", **GREEDY), tokens)


def test_cache_policies_serve_the_language_model() -> None:
    """Not those that move keys to other positions, where these have three axes."""
    model: Any = AutoModelForImageTextToText.from_config(tiny_config("qwen3_vl")).eval()
    pictured = with_image("qwen3_vl")
    with cache_policy(model, "gear-4"):
        cache = model.generate(**pictured, **GREEDY, return_dict_in_generate=True).past_key_values
    assert all(isinstance(layer, PolicyLayer) for layer in cache.layers)
    with pytest.raises(UnsupportedModelError, match="positions of images have three axes"):
        use_cache_policy(model, Streaming(positions="cache"))
