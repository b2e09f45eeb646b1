"""Calibration, export and serving on a GPU: what the CPU's tests say of them holds there."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from support.paths import DEMO_MODEL
from test_joint import SHAPE, layer_of
from transformers import AutoModelForCausalLM

import rotor
from rotor.calibration.codes.layer import layer_codes
from rotor.checkpoint.layout import KeyForm, LayerForm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = ["tokens.count=4096", "codes.tokens=2048"]


def test_codes_that_are_fitted_on_a_gpu_are_those_of_the_cpu() -> None:
    bases, fisher, _, _ = layer_of(SHAPE, LayerForm(KeyForm(64), 2, joint=True))
    for here, there in zip(
        layer_codes(bases, fisher).sides, layer_codes(bases, fisher, torch.device("cuda")).sides, strict=True
    ):
        for name, tensor in vars(here).items():
            found = getattr(there, name)
            assert found.device.type == "cpu"
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, calibrated and exported on the GPU."""
    folder = tmp_path_factory.mktemp("gpu")
    rotor.calibrate(DEMO_MODEL, folder / "run", overrides=TOKENS, device="cuda")
    rotor.export(folder / "run", folder / "out", compression=0.85, measure=False, device="cuda")
    return folder / "out"


def test_what_is_calibrated_and_exported_there_is_served_by_the_kernels(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels give what plain PyTorch gives, token by token behind a prompt, in a model with learned weights."""
    tokens = torch.arange(5, 405).mul(37).remainder(4000).cuda()[None]
    logits = {}
    for choice in ("reference", "triton"):
        monkeypatch.setitem(os.environ, "ROTOR_ATTENTION", choice)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to("cuda")
        cache, steps = None, []
        for part in (tokens[:, :370], *tokens[:, 370:].split(1, 1)):
            with torch.inference_mode():
                output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits[0, -1].double().log_softmax(-1))
        logits[choice] = torch.stack(steps)
    plain, kernels = logits["reference"], logits["triton"]
    divergence = (plain.exp() * (plain - kernels)).sum(-1)
    assert math.isfinite(divergence.max())
    assert divergence.mean() < 2e-3  # of two computations in bfloat16


def test_generation_with_a_static_cache_is_that_with_a_dynamic_one(out: Path) -> None:
    """transformers compiles steps of static caches on a GPU by itself."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to("cuda")
    prompt = torch.arange(5, 205).mul(37).remainder(4000).cuda()[None]
    found = [
        model.generate(prompt, max_new_tokens=24, do_sample=False, cache_implementation=kind, output_logits=True,
                       return_dict_in_generate=True)
        for kind in ("dynamic", "static")
    ]  # fmt: skip
    first, second = (torch.stack(each.logits).double().log_softmax(-1)[:8] for each in found)
    assert ((first.exp() * (first - second)).sum(-1)).mean() < 5e-3
