"""Uses of transformers with a checkpoint beside generating: each works, or says why it does not."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.paths import ROOT
from support.runs import FAST_EVALUATION, SHORT_TEXT, WITH_EXACT, calibrated
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

from rotor import calibrate, export
from rotor.errors import UsageError
from rotor.runtime.decoded import decoding

FAMILIES = ["llama", "opt", "gpt_neox", "gpt2", "falcon", "gemma3_text"]


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory: pytest.TempPathFactory):
    """exported(family) -> a checkpoint of a tiny model."""
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            folder = tmp_path_factory.mktemp("transformers")
            run = calibrated(tiny(family), folder / "run", "post", 1)
            built[family] = export(run.folder, folder / "out", compression=0.3, measure=False).folder
        return built[family]

    return get


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["import transformers.quantizers.auto, rotor", "import rotor"])
def test_what_asks_for_the_quantisation_before_it_loads_finds_rotor(order: str) -> None:
    """As lm-eval's `hf` model does."""
    program = f"""
{order}
from transformers.quantizers.auto import AutoQuantizationConfig
print(type(AutoQuantizationConfig.from_dict({{"quant_method": "rotor"}})).__name__)
from transformers import AutoModelForCausalLM
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.strip() == "RotorConfig", done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_model_alone(exported, family: str) -> None:
    tokens = torch.arange(24).reshape(2, 12)
    whole = AutoModelForCausalLM.from_pretrained(exported(family))
    base = AutoModel.from_pretrained(exported(family))
    with torch.inference_mode():
        expected = whole(tokens, output_hidden_states=True).hidden_states[-1]
        got = base(tokens).last_hidden_state
    torch.testing.assert_close(got, expected)


def test_another_attention_is_ignored_with_a_warning(exported, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported("llama")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rotor"):
        AutoModelForCausalLM.from_pretrained(folder)
        assert caplog.messages == []
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_attention_2")
    assert "attn_implementation='flash_attention_2' is ignored" in caplog.text


def test_attention_stays_rotors_when_another_is_set_after_loading(exported, caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported("llama"))
    tokens = torch.arange(5)[None]
    with torch.inference_mode():
        expected = model(tokens).logits
        caplog.clear()
        for asked in ("flex_attention", "eager"):
            model.set_attn_implementation(asked)
            assert model.config._attn_implementation == "rotor"
            assert f"attn_implementation='{asked}' is ignored" in caplog.text
        assert torch.equal(model(tokens).logits, expected)
        with pytest.raises(UsageError, match="the attention mask is of the type object, expected a tensor of 4 dim"):
            model.model.layers[0].self_attn(torch.zeros(1, 5, 48), None, object())


def test_a_prefix_of_another_model_is_refused(exported, tiny) -> None:
    """Keys and values of the source are not rows, in a dynamic as in a static cache."""
    source = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model = AutoModelForCausalLM.from_pretrained(exported("llama"))
    tokens = torch.arange(6)[None]
    for cache in (DynamicCache(config=source.config), StaticCache(config=source.config, max_cache_len=16)):
        with torch.no_grad():
            source(tokens, past_key_values=cache)
            with pytest.raises(UsageError, match=r"layer 0: the cache holds keys of 4 heads of 16 that another model"):
                model(tokens[:, :1], past_key_values=cache)


def test_attention_weights_are_refused(exported) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported("llama"))
    with pytest.raises(UsageError, match="output_attentions: compressed layers keep no attention weights"):
        model(torch.arange(5)[None], output_attentions=True)


@pytest.mark.parametrize("convert", ["half", "float", "to"])
def test_half_and_float_are_to(exported, tiny, convert: str) -> None:
    """transformers refuses them of quantised models; other models keep them."""
    wanted = torch.float32 if convert == "float" else torch.float16
    first = torch.float16 if convert == "float" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(exported("llama"), dtype=first)
    expected = AutoModelForCausalLM.from_pretrained(exported("llama"), dtype=wanted)
    got = model.to(wanted) if convert == "to" else getattr(model, convert)()
    assert got is model
    assert model.dtype == wanted
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-3, atol=1e-6)
    assert AutoModelForCausalLM.from_pretrained(tiny("llama")).half().dtype == torch.float16


@pytest.fixture(scope="module")
def of_wide_range(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of codes in which a basis reaches beyond float16, as those of 16-bit channels may."""
    folder = tmp_path_factory.mktemp("wide")
    run = calibrate(tiny("llama"), folder / "run", "rotor", [*FAST_EVALUATION, *SHORT_TEXT, *WITH_EXACT])
    out = export(run.folder, folder / "out", compression=0.6, measure=False).folder
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.self_attn.key_basis"] *= 1e5 / tensors["model.layers.1.self_attn.key_basis"].abs().max()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_numbers_beyond_float16_are_refused(of_wide_range: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(of_wide_range, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for convert in (model.half, lambda: model.to(torch.float16), model.model.half, lambda: nn.Sequential(model).half()):
        with pytest.raises(
            UsageError, match=r"layer 1: key_basis has numbers up to .*, and torch\.float16 reaches 6\.55"
        ):
            convert()
        if convert is model.half:  # nothing was changed
            assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes
    with pytest.raises(UsageError, match=r"layer 1: key_basis is not finite in torch\.float16") as caught:
        AutoModelForCausalLM.from_pretrained(of_wide_range, dtype=torch.float16)
    assert "dtype=torch.bfloat16" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_are_read_in_half_precision(of_wide_range: Path, tiny, tmp_path: Path, dtype: torch.dtype) -> None:
    """A run's own bases lie within float16; logits are those of float32."""
    export(of_wide_range.parent / "run", tmp_path / "out", compression=0.6, measure=False)
    rows, logits = torch.arange(1, 40)[None], []
    for wanted in (torch.float32, dtype):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=wanted).eval()
        with torch.no_grad(), decoding(model.modules()):
            logits.append(model(rows, use_cache=False).logits.float())
    assert relative_error(logits[1], logits[0]) < 0.05
