"""Layers, heads and values that reach nothing: their Fisher information is exactly zero, and they get no bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.quick import mostly_nightly
from support.runs import FAST_EVALUATION, SHORT_TEXT, WITH_EXACT
from transformers import AutoModelForCausalLM

from rotor import calibrate, export
from rotor.checkpoint.layout import LayerLayout
from rotor.runtime.decoded import decoding

ZEROED = {
    "o_proj": ("o_proj", slice(None), slice(None)),
    "o_proj of a KV head": ("o_proj", slice(None), slice(0, 32)),
    "v_proj": ("v_proj", slice(None), slice(None)),
    "v_proj of a KV head": ("v_proj", slice(0, 16), slice(None)),
    "k_proj": ("k_proj", slice(None), slice(None)),
    "q_proj": ("q_proj", slice(None), slice(None)),
}
"""Projection of the second of two layers, its rows and its columns."""


def zeroed(source: Path, out: Path, what: str, layers: tuple[int, ...] = (1,)) -> Path:
    """A copy of a model in which part of a projection is zero, biases among it."""
    name, rows, columns = ZEROED[what]
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    for layer in layers:
        for kind in ("weight", "bias"):
            tensor = tensors.get(f"model.layers.{layer}.self_attn.{name}.{kind}")
            if tensor is not None:
                tensor[(rows, columns) if kind == "weight" else rows] = 0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def overrides_of(recipe: str) -> list[str]:
    common = [*FAST_EVALUATION, *SHORT_TEXT, "ranks.multiple_of=4"]
    if recipe == "rotor":
        return [*common, *WITH_EXACT]
    common += ["tokens.source=random", "tokens.count=512", "tokens.seq_len=64"]
    return [*common, "prune.kmeans=16"] if recipe == "zdc" else common


CASES = [(what, recipe) for recipe in ("rotor", "fdc", "palu", "zack", "zdc") for what in ZEROED]


QUICK = [("o_proj", "rotor"), ("v_proj", "rotor"), ("o_proj", "palu")]


@pytest.mark.parametrize(("what", "recipe"), mostly_nightly(CASES, lambda case: case in QUICK))
def test_what_reaches_nothing_takes_nothing(what: str, recipe: str, tiny, tmp_path: Path) -> None:
    model = zeroed(tiny("llama"), tmp_path / "model", what)
    overrides = overrides_of(recipe)
    run = calibrate(model, tmp_path / "run", recipe, overrides)
    export(run.folder, tmp_path / "out", compression=0.8 if recipe == "rotor" else 0.5, measure=False)
    source, loaded = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("model", "out"))
    rows = torch.randint(1, 4096, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), decoding(loaded.modules()):
        got, expected = (own(rows, use_cache=False).logits for own in (loaded, source))
    assert torch.isfinite(got).all()
    if recipe == "rotor":
        assert relative_error(got, expected) < 0.5
    if recipe == "rotor" and what in ("o_proj", "v_proj"):
        section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        alive, dead = (LayerLayout.from_dict(section["layers"][layer], f"layer {layer}") for layer in "01")
        assert dead.row_bytes(2) == (2 * 16, 0)  # the shortest rows
        assert alive.row_bytes(2)[0] > 4 * 16


@pytest.mark.parametrize("recipe", ["rotor", "fdc", "palu"])
def test_a_model_whose_attention_reaches_nothing(recipe: str, tiny, tmp_path: Path) -> None:
    model = zeroed(tiny("llama"), tmp_path / "model", "o_proj", (0, 1))
    overrides = overrides_of(recipe)
    run = calibrate(model, tmp_path / "run", recipe, overrides)
    export(run.folder, tmp_path / "out", compression=0.8 if recipe == "rotor" else 0.5, measure=False)
    source, loaded = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("model", "out"))
    rows = torch.arange(1, 20)[None]
    with torch.no_grad(), decoding(loaded.modules()):
        assert relative_error(loaded(rows, use_cache=False).logits, source(rows).logits) < 1e-5
