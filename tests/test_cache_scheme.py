"""A source whose quantization_config only says how engines keep its cache: weights are whole, and it is compressed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import calibrated
from transformers import AutoModelForCausalLM

from rotor import export, validate
from rotor.checkpoint.families import find_family
from rotor.errors import UnsupportedModelError
from rotor.models.source import Checkpoint

SCHEME = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "format": "dense",
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "quantization_status": "frozen",
}


def with_scheme(source: Path, out: Path, **other: object) -> Path:
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": {**SCHEME, **other}}))
    tensors = load_file(out / "model.safetensors")
    scales = {f"model.layers.{i}.self_attn.{side}_scale": torch.ones(1) for i in (0, 1) for side in "kv"}
    save_file(tensors | scales, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_scheme_of_the_cache_alone_is_left_out(tiny, tmp_path: Path) -> None:
    model = with_scheme(tiny("llama"), tmp_path / "model")
    runs = [calibrated(folder, tmp_path / f"run-{i}", "post", 1) for i, folder in enumerate((model, tiny("llama")))]
    outs = [export(run.folder, tmp_path / f"out-{i}", compression=0.4).folder for i, run in enumerate(runs)]
    got, expected = (AutoModelForCausalLM.from_pretrained(out).state_dict() for out in outs)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert not [name for name in load_file(outs[0] / "model.safetensors") if name.endswith("_scale")]
    assert not [check for check in validate(outs[0], measure=False).checks if check.status == "fail"]


def test_weights_in_few_bits_are_refused_as_ever(tiny, tmp_path: Path) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}
    model = with_scheme(tiny("llama"), tmp_path / "model", config_groups=groups)
    with pytest.raises(UnsupportedModelError, match="already quantised"):
        find_family(Checkpoint(model).config)
